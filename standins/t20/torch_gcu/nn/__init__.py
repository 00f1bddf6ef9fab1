"""PyTorch's modules, and the vendor's wrappers."""

from torch.nn.modules import *  # noqa: F403

from .parallel import DataParallel  # noqa: F401
