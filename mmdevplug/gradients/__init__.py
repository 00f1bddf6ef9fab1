"""Average gradients over ranks: the model wrappers and what they use."""

from .separate_wrapper import DeviceSeparateDistributedDataParallel
from .wrapper import DeviceDistributedDataParallel

__all__ = ['DeviceDistributedDataParallel', 'DeviceSeparateDistributedDataParallel']
