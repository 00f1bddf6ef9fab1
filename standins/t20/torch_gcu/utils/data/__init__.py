"""Samplers."""

from .distributed import DistributedSampler

__all__ = ['DistributedSampler']
