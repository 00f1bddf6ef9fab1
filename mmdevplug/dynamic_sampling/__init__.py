"""Draw samples on all ranks until together they have enough that are valid."""

from .report import SamplingReport
from .sampler import DynamicSampler

__all__ = ['DynamicSampler', 'SamplingReport']
