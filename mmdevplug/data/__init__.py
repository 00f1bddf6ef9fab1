"""Batches that can be continued in the middle of an epoch."""

from .batches import ResumableBatches
from .building import make_resumable

__all__ = ['ResumableBatches', 'make_resumable']
