"""Draw samples on all ranks until together they have enough that are valid."""

from .progress import SamplingReport
from .sampler import DynamicSampler

__all__ = ['DynamicSampler', 'SamplingReport']
