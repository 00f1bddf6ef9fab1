"""Accelerators: what a family of devices can do. Knows nothing of the rest of the package."""

from .base import Accelerator, devices_of
from .cpu import CPUAccelerator
from .cuda import CUDAAccelerator
from .detection import (
    available_accelerators,
    choose_accelerator,
    current_accelerator,
    get_accelerator,
    set_current_accelerator,
)
from .gcu import S60Accelerator, T20Accelerator
from .guard import DeviceGuard
from .nested import replace_parts, tensors_in, to_device
from .probe import probe_device
from .stacking import stack_samples
from .torch_native import TorchNativeAccelerator
from .xla import XLAAccelerator

__all__ = [
    'Accelerator',
    'CPUAccelerator',
    'CUDAAccelerator',
    'DeviceGuard',
    'S60Accelerator',
    'T20Accelerator',
    'TorchNativeAccelerator',
    'XLAAccelerator',
    'available_accelerators',
    'choose_accelerator',
    'current_accelerator',
    'devices_of',
    'get_accelerator',
    'probe_device',
    'replace_parts',
    'set_current_accelerator',
    'stack_samples',
    'tensors_in',
    'to_device',
]
