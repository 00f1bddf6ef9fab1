"""Data loaders that can go on in the middle of an epoch, checks of data, and padding."""

from .resumable_loader import ResumableBatches, make_resumable

__all__ = ['ResumableBatches', 'make_resumable']
