"""Average gradients over ranks: the model wrappers and what they use."""
# ruff: noqa: E402

from mmdevplug import require_mmengine

require_mmengine()  # before imports that need it

from .separate_wrapper import DeviceSeparateDistributedDataParallel
from .wrapper import DeviceDistributedDataParallel

__all__ = ['DeviceDistributedDataParallel', 'DeviceSeparateDistributedDataParallel']
