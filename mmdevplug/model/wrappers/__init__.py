from .device_distributed import DeviceDistributedDataParallel
from .separate_distributed import DeviceSeparateDistributedDataParallel

__all__ = ['DeviceDistributedDataParallel', 'DeviceSeparateDistributedDataParallel']
