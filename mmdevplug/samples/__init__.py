"""Exchange nested samples between ranks: tensors and plain values, never code."""

from mmdevplug.utils.pytree import register_sample_type

from .balancing import balance_samples
from .gathering import gather_samples
from .sampler import DynamicSampler, SamplingReport
from .stacking import stack_samples

__all__ = [
    'DynamicSampler',
    'SamplingReport',
    'balance_samples',
    'gather_samples',
    'register_sample_type',
    'stack_samples',
]
