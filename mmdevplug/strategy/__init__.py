"""Which parallelism a job uses, and strategies of MMEngine's FlexibleRunner."""

from .device_strategy import DeviceStrategy
from .model_parallel_strategy import ModelParallelStrategy
from .options import ModelParallelOptions
from .resolve import TrainingStrategy, resolve_strategy

__all__ = [
    'DeviceStrategy',
    'ModelParallelOptions',
    'ModelParallelStrategy',
    'TrainingStrategy',
    'resolve_strategy',
]
