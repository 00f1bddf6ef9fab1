"""The vendor's fork of PyTorch's sharded optimizer."""

from .zero_redundancy_optimizer import ZeroRedundancyOptimizer  # noqa: F401
