"""Average gradients over ranks: the model wrappers and what they use."""

from mmdevplug.registry import MODULES, importing

__all__ = [*MODULES['gradients']]
__getattr__ = importing(__name__, MODULES['gradients'])
