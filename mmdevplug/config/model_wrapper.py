"""The options of ``model_wrapper_cfg``, besides those of PyTorch's and MMEngine's wrappers."""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, NamedTuple, Optional, Union

from mmdevplug.errors import ModelError

from .fields import Options, choice, option, positive

COMPRESSIONS = ('none', 'bf16', 'fp16', 'powersgd')


class GradCompression(NamedTuple):
    """How gradients are compressed for messages: one of :data:`COMPRESSIONS`."""

    kind: str
    powersgd_options: Dict[str, Any]


def _read_grad_compression(value: object, key: str) -> GradCompression:
    """Read a name, or a dict with it as ``type`` and options of PyTorch's ``PowerSGDState``."""
    options: Dict[str, Any] = dict(value) if isinstance(value, Mapping) else dict(type=value)
    kind = options.pop('type', '')
    if kind is None and not options:
        kind = 'none'
    if kind not in COMPRESSIONS or (options and kind != 'powersgd'):
        raise ModelError(
            f'model_wrapper_cfg.grad_compression={value!r}: expected one of '
            f'{", ".join(map(repr, COMPRESSIONS))}, or a dict such as '
            f"dict(type='powersgd', matrix_approximation_rank=2, start_powerSGD_iter=100); the "
            f'others take no options.'
        )
    return GradCompression(kind, options)


@dataclass(frozen=True)
class WrapperOptions(Options):
    """What :class:`mmdevplug.DeviceDistributedDataParallel` takes of ours."""

    key, error = 'model_wrapper_cfg', ModelError

    bucket_cap_mb: Optional[float] = option(
        None,
        'Size of a message in MB; `None` for 5 where gradients pass through the host, 16 where '
        "its ranks share memory, 8 on lazy devices, and PyTorch's own elsewhere.",
        check=positive(zero=True).or_none(),
    )
    grad_compression: GradCompression = option(
        'none',
        "What travels instead of float32, by PyTorch's hooks: half precision, or low-rank "
        "matrices. A dict with `type='powersgd'` holds options of PyTorch's `PowerSGDState`, too.",
        accepts=f'{", ".join(map(repr, COMPRESSIONS))}, dict',
        read=_read_grad_compression,
    )
    hierarchy: Union[str, bool] = option(
        'auto',
        'Whether gradients on the CPU, and those that pass through the host, are averaged in the '
        "shared memory of each host first, and then between hosts; `'auto'` where several ranks "
        'share a host and each host has as many.',
        check=choice('auto', True, False),
    )
    nonfinite_grads: Optional[str] = option(
        None,
        'What all ranks do when one has NaN or infinite gradients: stop and name the rank '
        'and parameters, skip the update, or go on. A gradient scaler, which skips by itself, '
        "has precedence. `None` for `'stop'` where gradients pass through the host, at no "
        "cost, and for `'ignore'` elsewhere.",
        check=choice('stop', 'skip', 'ignore').or_none(),
    )
