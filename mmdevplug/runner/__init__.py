"""Runners and loops."""

from .device_runner import DeviceRunner
from .dynamic_sampling_loop import DynamicSamplingTrainLoop

__all__ = ['DeviceRunner', 'DynamicSamplingTrainLoop']
