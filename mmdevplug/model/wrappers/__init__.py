from .device_distributed import DeviceDistributedDataParallel

__all__ = ['DeviceDistributedDataParallel']
