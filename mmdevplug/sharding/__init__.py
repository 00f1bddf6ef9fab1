"""Shard a model over the ranks of a job, by PyTorch's FSDP2."""

from .shard import Sharding

__all__ = ['Sharding']
