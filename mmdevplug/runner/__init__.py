"""Runners, strategies of DeviceFlexibleRunner, and loops: where the pieces meet."""

from .device_runner import DeviceRunner
from .dynamic_sampling_loop import DynamicSamplingTrainLoop
from .flexible_runner import DeviceFlexibleRunner
from .init_device import init_device
from .strategies import DeviceStrategy, ModelParallelStrategy

__all__ = [
    'DeviceFlexibleRunner',
    'DeviceRunner',
    'DeviceStrategy',
    'DynamicSamplingTrainLoop',
    'ModelParallelStrategy',
    'init_device',
]
