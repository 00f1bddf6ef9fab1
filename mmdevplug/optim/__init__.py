"""Optimizer wrappers for lazy devices and for mixed precision."""

from mmdevplug.registry import MODULES, importing

__all__ = [*MODULES['optim']]
__getattr__ = importing(
    __name__,
    dict(MODULES['optim'], adapt_optim_wrapper_cfg='adapt_config', use_amp='adapt_config'),
)
