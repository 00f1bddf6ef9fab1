"""One model over several cards of a process, or of several processes."""

import warnings

from .data_parallel import DataParallel, data_parallel
from .distributed import DistributedDataParallel
from .parallel_apply import parallel_apply
from .replicate import replicate
from .scatter_gather import gather, scatter

__all__ = [
    'replicate',
    'scatter',
    'parallel_apply',
    'gather',
    'data_parallel',
    'DataParallel',
    'DistributedDataParallel',
]


def DistributedDataParallelCPU(*args, **kwargs):
    warnings.warn('DistributedDataParallelCPU is deprecated', stacklevel=2)
    return DistributedDataParallel(*args, **kwargs)
