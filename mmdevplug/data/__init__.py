"""Data loaders that can go on in the middle of an epoch, checks of data, and padding."""

from .resumable_loader import ResumableLoader, make_resumable

__all__ = ['ResumableLoader', 'make_resumable']
