"""Accelerators: one object for each family of devices, and choosing one of them.

A family's module is imported when its name is looked up, see :mod:`mmdevplug.registry`.
"""

from mmdevplug.registry import importing

from .base import Accelerator, Compilation, Copies, Precision, devices_of
from .context import (
    DEFAULT_TIMEOUT,
    DeviceContext,
    context_of,
    device_context,
    enter_rank_device,
    group_timeout,
    rank_context,
    set_device_context,
)
from .cpu import CPUAccelerator
from .detection import available_accelerators, choose_accelerator, get_accelerator
from .move_nested import to_device

__getattr__ = importing(
    __name__,
    dict(
        CUDAAccelerator='cuda',
        S60Accelerator='gcu',
        T20Accelerator='gcu',
        TPUAccelerator='tpu',
        TorchNativeAccelerator='torch_native',
        XLAAccelerator='xla',
        probe_device='probe',
    ),
)

__all__ = [
    'Accelerator',
    'CPUAccelerator',
    'CUDAAccelerator',
    'Compilation',
    'Copies',
    'DEFAULT_TIMEOUT',
    'DeviceContext',
    'Precision',
    'S60Accelerator',
    'T20Accelerator',
    'TPUAccelerator',
    'TorchNativeAccelerator',
    'XLAAccelerator',
    'available_accelerators',
    'choose_accelerator',
    'context_of',
    'device_context',
    'devices_of',
    'enter_rank_device',
    'get_accelerator',
    'probe_device',
    'group_timeout',
    'rank_context',
    'set_device_context',
    'to_device',
]
