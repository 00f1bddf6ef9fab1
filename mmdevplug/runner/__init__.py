"""Runners, strategies of FlexibleRunner, and loops: where the pieces meet."""

from .device_runner import DeviceRunner
from .device_strategy import DeviceStrategy
from .dynamic_sampling_loop import DynamicSamplingTrainLoop
from .init_device import init_device
from .model_parallel_strategy import ModelParallelStrategy

__all__ = [
    'DeviceRunner',
    'DeviceStrategy',
    'DynamicSamplingTrainLoop',
    'ModelParallelStrategy',
    'init_device',
]
