"""Accelerators: one object for each family of devices, and choosing one of them."""

from .base import Accelerator, Compilation, Copies, Precision, devices_of
from .context import (
    DEFAULT_TIMEOUT,
    DeviceContext,
    current_accelerator,
    device_context,
    enter_rank_device,
    rank_device,
    rank_devices,
    set_device_context,
)
from .cpu import CPUAccelerator
from .cuda import CUDAAccelerator
from .detection import (
    available_accelerators,
    choose_accelerator,
    get_accelerator,
)
from .gcu import S60Accelerator, T20Accelerator
from .move_nested import to_device
from .probe import probe_device
from .torch_native import TorchNativeAccelerator
from .tpu import TPUAccelerator
from .xla import XLAAccelerator

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
    'current_accelerator',
    'device_context',
    'devices_of',
    'enter_rank_device',
    'get_accelerator',
    'probe_device',
    'rank_device',
    'rank_devices',
    'set_device_context',
    'to_device',
]
