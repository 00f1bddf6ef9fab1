"""The options of ``model_wrapper_cfg``, besides those of PyTorch's and MMEngine's wrappers."""

from dataclasses import dataclass
from typing import Optional

from mmdevplug.errors import ModelError

from .fields import Options, choice, option, positive


@dataclass(frozen=True)
class WrapperOptions(Options):
    """Options of ours that :class:`mmdevplug.DeviceDistributedDataParallel` takes."""

    key, error = 'model_wrapper_cfg', ModelError

    bucket_cap_mb: Optional[float] = option(
        None,
        'Size of a message in MB; `None` for 5 where gradients pass through the host, 16 where '
        "its ranks share memory (less over several hosts), 8 on lazy devices, and PyTorch's own "
        'elsewhere.',
        check=positive(zero=True, most=1e6),
    )
    grad_compression: str = option(
        'none',
        "What travels instead of float32: `'bf16'` is PyTorch's hook, for slow links between "
        'hosts; other hooks are for `register_comm_hook`.',
        check=choice('none', 'bf16'),
    )
    nonfinite_grads: Optional[str] = option(
        None,
        'What all ranks do when one has NaN or infinite gradients: stop and name the rank '
        'and parameters, or go on. A gradient scaler, which skips by itself, has precedence. '
        "`None` for `'stop'` where gradients pass through the host, at no cost, and for "
        "`'ignore'` elsewhere.",
        check=choice('stop', 'ignore'),
    )
