"""Patch MMEngine's ``autocast`` for devices that MMEngine does not know.

Models use ``from mmengine.runner.amp import autocast``. That function refuses devices that
MMEngine does not list, or silently casts for the CPU.
"""

from functools import wraps
from inspect import signature
from typing import Any, Iterator, Optional

import torch
from mmengine import device as mmengine_device
from mmengine.runner.amp import autocast

from mmdevplug.accelerators import Accelerator, current_accelerator
from mmdevplug.utils.patching import KEPT, active_patches, patch_symbol
from mmdevplug.utils.torch_compat import keep_from_tracing

#: Collectives and checks, at which torch.compile would break its graphs. The model and the
#: optimizer that they call are compiled all the same.
UNTRACED = 'distributed fault_tolerance gradients hooks model staged'

#: The devices with a gradient scaler that MMEngine knows; 0.10.0 does not know MUSA.
_KNOWN = ('cuda', 'npu', 'mlu', 'musa')

#: The generator function inside MMEngine's context manager.
_of_mmengine = autocast.__wrapped__


def mmengine_supports(accelerator: Accelerator) -> bool:
    """Whether MMEngine's own mixed precision works on an accelerator's devices."""
    kind = accelerator.device_type
    available = getattr(mmengine_device, f'is_{kind}_available', None)
    return kind in _KNOWN and available is not None and available()


def patch_autocast(accelerator: Accelerator, compiled: bool = False) -> None:
    """Let ``mmengine.runner.amp.autocast`` cast on an accelerator that MMEngine does not know.

    Models have imported the function already, so the generator in its closure is replaced. At
    each call it looks up the current accelerator, and calls MMEngine's for other device types
    that the caller names. If the model is ``compiled``, it is replaced on every accelerator:
    MMEngine's parses the version of PyTorch, at which torch.compile fails with InvalidVersion.
    """
    if compiled:
        _ = accelerator.precision  # made here, which torch.compile cannot trace
    if (compiled or not mmengine_supports(accelerator)) and not active_patches(autocast):
        patch_symbol(autocast, 'func', _autocast, KEPT)


def prepare_compiling(accelerator: Accelerator) -> None:
    """Keep torch.compile from our own functions, and from what it cannot trace of MMEngine's."""
    keep_from_tracing(*[f'mmdevplug.{part}' for part in UNTRACED.split()])
    patch_autocast(accelerator, compiled=True)


def patch_cuda_autocast(accelerator: Accelerator) -> None:
    """Let ``torch.cuda.amp.autocast`` be that of the device, on a host without CUDA.

    Models turn mixed precision off with it where a loss or a cost needs float32, which would have
    no effect. On the CPU it turns nothing on: PyTorch says that there is no CUDA.
    """
    kind, original = accelerator.device_type, torch.autocast.__init__
    # Not where the vendor's autocast is another one, or there is none.
    its_own = getattr(accelerator.precision.autocast(enabled=False), 'device', None) == kind
    if kind == 'cuda' or torch.cuda.is_available() or not its_own:
        return

    @getattr(torch, '_disable_dynamo', lambda function: function)  # since PyTorch 2.1
    @wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        given = signature(original).bind(self, *args, **options)
        told = given.arguments
        if told['device_type'] == 'cuda' and (kind != 'cpu' or not told.get('enabled', True)):
            told['device_type'] = kind
            options = told if 'dtype' in told else told.get('kwargs', {})  # PyTorch 1.10
            if options.get('dtype') == torch.float16:  # the default of torch.cuda.amp
                options['dtype'] = _dtype_around(kind) or accelerator.precision.dtype
        original(*given.args, **given.kwargs)

    patch_symbol(torch.autocast, '__init__', init)


def _autocast(
    device_type: Optional[str] = None,
    dtype: Optional[torch.dtype] = None,
    enabled: bool = True,
    cache_enabled: Optional[bool] = None,
) -> Iterator[None]:
    """See :func:`mmengine.runner.amp.autocast`."""
    accelerator = current_accelerator()
    if device_type not in (None, accelerator.name, accelerator.device_type):
        yield from _of_mmengine(device_type, dtype, enabled, cache_enabled)
        return
    if enabled and dtype is None:
        dtype = _dtype_around(accelerator.device_type)
    # The T20's autocast refuses None.
    options: Any = {} if cache_enabled is None else dict(cache_enabled=cache_enabled)
    with accelerator.precision.autocast(dtype=dtype, enabled=enabled, **options):
        yield


def _dtype_around(device_type: str) -> Optional[torch.dtype]:
    """The dtype of the context around, which an inner one without a dtype inherits.

    None where there is none, before PyTorch 2.4, and on devices that autocast does not know.
    """
    if not hasattr(torch, 'get_autocast_dtype'):
        return None
    try:
        around = torch.is_autocast_enabled(device_type)
        return torch.get_autocast_dtype(device_type) if around else None
    except RuntimeError:
        return None
