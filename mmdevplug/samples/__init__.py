"""Nested samples from rank to rank: packed tensors and typed plain values, nothing to be run."""

from .balancing import balance_samples
from .gathering import gather_samples
from .stacking import stack_samples

__all__ = ['balance_samples', 'gather_samples', 'stack_samples']
