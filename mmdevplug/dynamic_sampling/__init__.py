"""Draw samples on all ranks until together they have enough that are valid."""
# ruff: noqa: E402

from mmdevplug import require_mmengine

require_mmengine()  # before imports that need it

from .progress import SamplingReport
from .sampler import DynamicSampler

__all__ = ['DynamicSampler', 'SamplingReport']
