"""Answer for any device what functions of model repositories answer for CUDA alone."""

import sys

import torch
from torch import nn

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
                patch_symbol(user, 'get_module_device', _device_of, listed_owner=owner)


def _device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter of a module."""
    for parameter in module.parameters():
        return parameter.device
    raise ValueError(f'{type(module).__name__} has no parameters, which would say its device.')
