"""Hooks of MMEngine, one in each file, which is imported when its hook is named."""

from mmdevplug.registry import MODULES, importing

__all__ = [*MODULES['hooks']]
__getattr__ = importing(__name__, MODULES['hooks'])
