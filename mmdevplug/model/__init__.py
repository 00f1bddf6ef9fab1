"""Model wrappers and what moves models to devices."""

from .move import describe_misplaced, misplaced_tensors, move_module, weights_on_host
from .wrappers import DeviceDistributedDataParallel, DeviceSeparateDistributedDataParallel

__all__ = [
    'DeviceDistributedDataParallel',
    'DeviceSeparateDistributedDataParallel',
    'describe_misplaced',
    'misplaced_tensors',
    'move_module',
    'weights_on_host',
]
