"""Optimizer wrappers for lazy devices and for mixed precision."""

from .adapt_config import (
    adapt_optim_wrapper_cfg,
    check_optimizers,
    join_consolidation,
    use_amp,
)
from .device_amp_optim_wrapper import DeviceAmpOptimWrapper, set_overflow_source
from .device_optim_wrapper import DeviceOptimWrapper, log_norms

__all__ = [
    'DeviceAmpOptimWrapper',
    'DeviceOptimWrapper',
    'adapt_optim_wrapper_cfg',
    'check_optimizers',
    'join_consolidation',
    'log_norms',
    'set_overflow_source',
    'use_amp',
]
