"""Exchange nested samples between ranks: tensors and plain values, never code."""

from .balancing import balance_samples
from .gathering import gather_samples
from .sampler import DynamicSampler, SamplingReport
from .stacking import stack_samples

__all__ = [
    'DynamicSampler',
    'SamplingReport',
    'balance_samples',
    'gather_samples',
    'stack_samples',
]
