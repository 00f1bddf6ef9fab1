"""Patch MMEngine's ``autocast`` for devices that MMEngine does not know.

Models use ``from mmengine.runner.amp import autocast``. That function refuses devices that
MMEngine does not list, or silently casts for the CPU.
"""

from functools import partial, wraps
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any, Callable, Iterator, Optional

import torch
from mmengine import device as mmengine_device
from mmengine.runner.amp import autocast

from mmdevplug.accelerators import Accelerator, rank_context
from mmdevplug.utils.model import list_optim_wrappers
from mmdevplug.utils.patching import KEPT, active_patches, patch_symbol
from mmdevplug.utils.torch_compat import keep_from_tracing

#: Collectives and checks, at which torch.compile would break its graphs. The model and the
#: optimizer that they call are compiled all the same.
UNTRACED = 'distributed fault_tolerance gradients hooks lazy model staged'

#: The devices with a gradient scaler that MMEngine knows; 0.10.0 does not know MUSA.
_KNOWN = ('cuda', 'npu', 'mlu', 'musa')

#: The generator function inside MMEngine's context manager, and a copy that stays as it is.
_GENERATOR = autocast.__wrapped__
_of_mmengine = FunctionType(
    _GENERATOR.__code__, _GENERATOR.__globals__, argdefs=_GENERATOR.__defaults__
)


def mmengine_supports(accelerator: Accelerator) -> bool:
    """Whether MMEngine's own mixed precision works on an accelerator's devices."""
    kind = accelerator.device_type
    available = getattr(mmengine_device, f'is_{kind}_available', None)
    return kind in _KNOWN and available is not None and available()


def patch_autocast(accelerator: Accelerator, compiled: bool = False) -> None:
    """Let ``mmengine.runner.amp.autocast`` cast on an accelerator that MMEngine does not know.

    Models have imported the function already, and those of mmdet3d have decorated methods with
    it, so the code of the generator function is replaced. At each call it looks up the current
    accelerator, and calls MMEngine's for other device types that the caller names. If the model is
    ``compiled``, it is replaced on every accelerator: MMEngine's parses the version of PyTorch, at
    which torch.compile fails with InvalidVersion.
    """
    if compiled:
        _ = accelerator.precision  # made here, which torch.compile cannot trace
    if (compiled or not mmengine_supports(accelerator)) and not active_patches(_GENERATOR):
        patch_symbol(_GENERATOR, '__code__', _redirected.__code__, KEPT)


def prepare_compiling(accelerator: Accelerator, optim_wrapper: object) -> None:
    """Keep torch.compile from our own functions, and from what it cannot trace of MMEngine's.

    ``paramwise_cfg`` makes parameter groups of MMEngine's ``ConfigDict``, at which the compiler of
    PyTorch 2.13 fails in the step of Adam and others.
    """
    for each in list_optim_wrappers(optim_wrapper):
        groups = getattr(getattr(each, 'optimizer', None), 'param_groups', [])
        groups[:] = [dict(group) for group in groups]
    keep_from_tracing(*[f'mmdevplug.{part}' for part in UNTRACED.split()])
    patch_autocast(accelerator, compiled=True)


def patch_cuda_autocast(accelerator: Accelerator) -> None:
    """Let ``torch.cuda.amp.autocast`` be that of the device, on a host without CUDA.

    Models turn mixed precision off with it where a loss or a cost needs float32, which would have
    no effect; so do functions of autograd with ``custom_fwd(cast_inputs=torch.float32)``. On the
    CPU it turns no float16 on: PyTorch says that there is no CUDA.
    """
    kind, original = accelerator.device_type, torch.autocast.__init__
    enter = torch.autocast.__enter__
    # False if the vendor has an autocast of another kind, or none.
    its_own = getattr(accelerator.precision.autocast(enabled=False), 'device', None) == kind
    if kind == 'cuda' or torch.cuda.is_available() or not its_own:
        return

    untraced = getattr(torch, '_disable_dynamo', lambda function: function)  # since PyTorch 2.1

    @untraced
    @wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        given = signature(original).bind(self, *args, **options)
        told = given.arguments
        if told['device_type'] != 'cuda':
            original(*given.args, **given.kwargs)
            return
        options = told if 'dtype' in told else told.get('kwargs', {})  # PyTorch 1.10
        self.of_cuda = enabled, dtype = told.get('enabled', True), options.get('dtype')
        # PyTorch checks dtypes for CUDA, and warns that there is none.
        told['enabled'] = kind == 'cpu' and enabled and dtype in (None, torch.float16)
        original(*given.args, **given.kwargs)
        self._enabled = enabled  # torch.compile reads it

    @untraced
    @wraps(enter)
    def enter_that_of_device(self: Any) -> Any:
        if self.device == 'cuda' and not hasattr(self, 'of_cuda'):
            # Created before, by a decorator: PyTorch has disabled it, whatever was asked.
            self.of_cuda = self.fast_dtype == torch.float32, self.fast_dtype
        if hasattr(self, 'of_cuda'):
            (enabled, dtype), around = self.of_cuda, _dtype_around(kind)
            wide = enabled and dtype == torch.float32
            if dtype != torch.bfloat16:  # float16 is the default of torch.cuda.amp
                dtype = around or accelerator.precision.dtype
                enabled = enabled and not wide and (kind != 'cpu' or around is not None)
            its = torch.autocast(kind, dtype=dtype, enabled=enabled)
            self.device, self._enabled, self.fast_dtype = kind, its._enabled, its.fast_dtype
            # All devices can cast to float32, but PyTorch's check allows it on CUDA alone.
            if wide and hasattr(torch, 'get_autocast_dtype'):  # since PyTorch 2.4
                self._enabled, self.fast_dtype = True, torch.float32
        return enter(self)

    def of_device(function: Callable, place: int) -> Callable:
        @wraps(function)
        def call(*args: object, **options: object) -> object:
            if args[place : place + 1] == ('cuda',):
                args = (*args[:place], kind, *args[place + 1 :])
            return function(*args, **options)

        return call

    patch_symbol(torch.autocast, '__init__', init)
    patch_symbol(torch.autocast, '__enter__', enter_that_of_device)
    if hasattr(torch, 'get_autocast_dtype'):  # since PyTorch 2.4: custom_fwd() calls these
        mode = torch.amp.autocast_mode
        # In that module alone: others, the compiler too, save and restore CUDA's own state.
        seen_there: Any = ModuleType('torch')
        seen_there.__getattr__ = partial(getattr, torch)
        for name in ('is_autocast_enabled', 'get_autocast_dtype'):
            setattr(seen_there, name, of_device(getattr(torch, name), 0))
        patch_symbol(mode, 'torch', seen_there)
        patch_symbol(mode, '_cast', of_device(mode._cast, 1))


def _autocast(
    device_type: Optional[str] = None,
    dtype: Optional[torch.dtype] = None,
    enabled: bool = True,
    cache_enabled: Optional[bool] = None,
) -> Iterator[None]:
    """See :func:`mmengine.runner.amp.autocast`."""
    accelerator = rank_context().accelerator
    if device_type not in (None, accelerator.name, accelerator.device_type):
        yield from _of_mmengine(device_type, dtype, enabled, cache_enabled)
        return
    if enabled and dtype is None:
        dtype = _dtype_around(accelerator.device_type)
    # The T20's autocast refuses None.
    options: Any = {} if cache_enabled is None else dict(cache_enabled=cache_enabled)
    with accelerator.precision.autocast(dtype=dtype, enabled=enabled, **options):
        yield


def _redirected(
    device_type: Optional[str], dtype: Any, enabled: bool, cache_enabled: Optional[bool]
) -> Iterator[None]:
    """Call :func:`_autocast` from MMEngine's function, whose globals this code has."""
    from mmdevplug.patches.autocast import _autocast

    yield from _autocast(device_type, dtype, enabled, cache_enabled)


def _dtype_around(device_type: str) -> Optional[torch.dtype]:
    """The dtype of the context around, which an inner one without a dtype inherits.

    None where there is none and on devices that autocast does not know; before PyTorch 2.4 on all
    but the CPU.
    """
    if not hasattr(torch, 'get_autocast_dtype'):
        if device_type != 'cpu' or not torch.is_autocast_cpu_enabled():
            return None
        # PyTorch 1.10 returns a copy, which is not equal to torch.bfloat16.
        return torch.empty(0, dtype=torch.get_autocast_cpu_dtype(), device='cpu').dtype
    try:
        around = torch.is_autocast_enabled(device_type)
        return torch.get_autocast_dtype(device_type) if around else None
    except RuntimeError:
        return None
