"""Answer for any device what model repositories ask of CUDA alone."""

import dis
import sys
from functools import lru_cache
from types import CodeType
from typing import Any, Set, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.patching import patch_symbol

#: Modules with a function ``get_module_device``, which says ``cpu`` for all devices but CUDA.
_OWNERS = (
    'mmagic.models.utils.model_utils',
    'mmgen.models.architectures.common',
    'mmrazor.models.utils.utils',
)


def patch_module_device() -> None:
    """Patch these functions wherever they have been imported; noise is made where they say."""
    for owner in _OWNERS:
        original = getattr(sys.modules.get(owner), 'get_module_device', None)
        for user in list(sys.modules.values()) if original not in (None, _device_of) else ():
            if getattr(user, '__dict__', {}).get('get_module_device') is original:
                patch_symbol(user, 'get_module_device', _device_of)


def _device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter of a module."""
    for parameter in module.parameters():
        return parameter.device
    raise ValueError(f'{type(module).__name__} has no parameters, which would say its device.')


def patch_cuda_calls(device: torch.device) -> None:
    """Let ``.cuda()`` move tensors to a device of a host without CUDA, and name the line once.

    ``is_cuda`` is true of tensors there for code that asks it to decide on such a call, or on a
    collective; to all other code, which may have a kernel of CUDA in mind, it is false.
    """
    if device.type == 'cuda' or torch.cuda.is_available():
        return
    told: Set[Tuple[str, int]] = set()
    of_type = Tensor.type

    def cuda(tensor: Tensor, *_: object, **__: object) -> Tensor:
        from mmdevplug.device_guard.stack_location import user_frame

        frame = user_frame()
        place = (frame.f_code.co_filename, frame.f_lineno) if frame else ('', 0)
        if place not in told:
            told.add(place)
            log_warning(f'{place[0]}:{place[1]} asks for CUDA, and gets {device}.')
        return tensor.to(device)

    def cast(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if getattr(dtype, '__module__', None) == 'torch.cuda':
            return cuda(tensor).to(dtype.dtype)
        return of_type(tensor, dtype, *args, **kwargs)

    def is_cuda(tensor: Tensor) -> bool:
        if tensor.device.type != device.type:
            return False
        from mmdevplug.device_guard.stack_location import is_of_user

        frame = sys._getframe(1)
        return is_of_user(frame) and _decides(frame.f_code)

    patch_symbol(Tensor, 'cuda', cuda)
    patch_symbol(Tensor, 'type', cast)
    if device.type != 'cpu':
        patch_symbol(Tensor, 'is_cuda', property(is_cuda))


@lru_cache(maxsize=None)
def _decides(code: CodeType) -> bool:
    """Whether code has a call of ``.cuda()``, not of ``torch.cuda``, or of a collective."""
    names = [step.argval for step in dis.get_instructions(code)]
    return any(
        name == 'all_reduce' or (name == 'cuda' and before != 'torch')
        for before, name in zip(['', *names], names)
    )
