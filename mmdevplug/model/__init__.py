"""Model wrappers and what moves models to devices."""

from .move import describe_misplaced, misplaced_tensors, move_module, weights_on_host
from .wrappers import DeviceDistributedDataParallel

__all__ = [
    'DeviceDistributedDataParallel',
    'describe_misplaced',
    'misplaced_tensors',
    'move_module',
    'weights_on_host',
]
