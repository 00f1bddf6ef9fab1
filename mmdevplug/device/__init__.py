"""Accelerators: what a family of devices can do. Knows nothing of the rest of the package."""

from .base import HOST_BACKENDS, Accelerator, devices_of, registered_device_types
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
    'HOST_BACKENDS',
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
    'registered_device_types',
    'replace_parts',
    'set_current_accelerator',
    'stack_samples',
    'tensors_in',
    'to_device',
]
