"""Exchange nested samples between ranks: tensors and plain values, never code."""

from .balancing import balance_samples
from .gathering import gather_samples
from .stacking import stack_samples

__all__ = ['balance_samples', 'gather_samples', 'stack_samples']
