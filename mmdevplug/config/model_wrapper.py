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
        'Size of a message in MB; `None`: 5 if gradients pass through the host, 16 if ranks share '
        "memory (less over several hosts), 8 on lazy devices, PyTorch's own elsewhere.",
        check=positive(zero=True, most=1e6),
    )
    grad_compression: str = option(
        'none',
        "Replaces float32 in messages: `'bf16'` is PyTorch's hook, for slow links between hosts; "
        'register other hooks with `register_comm_hook`.',
        check=choice('none', 'bf16'),
    )
    nonfinite_grads: Optional[str] = option(
        None,
        'After NaN or infinite gradients of a rank, all ranks stop and name the rank and '
        'parameters, or continue. A gradient scaler skips by itself, and has precedence. '
        "`None`: `'stop'` if gradients pass through the host, at no cost; `'ignore'` elsewhere.",
        check=choice('stop', 'ignore'),
    )
