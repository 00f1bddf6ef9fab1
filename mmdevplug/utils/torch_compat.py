"""Differences between releases of PyTorch, with the release that makes each one unnecessary."""

from functools import lru_cache

import torch
from mmengine.utils import digit_version
from torch import Tensor

#: Integers by size in bytes, whose memory NumPy can share.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@lru_cache(maxsize=None)
def _views_change_sizes() -> bool:
    try:
        torch.empty(4, dtype=torch.uint8).view(torch.int32)
    except RuntimeError:  # PyTorch 1.10
        return False
    return True


def is_at_least(release: str) -> bool:
    """Whether this is a release of PyTorch, or a later one."""
    return digit_version(torch.__version__) >= digit_version(release)


def asks_samplers_for_batches() -> bool:
    """Whether a data loader asks its data set for ``__getitems__``: from PyTorch 1.13 on."""
    return is_at_least('1.13.0')


def gathers_into_tensor() -> bool:
    """Whether gloo gathers into one tensor: from PyTorch 2.4 on."""
    return is_at_least('2.4.0')


def allows_renamed_classes() -> bool:
    """Whether ``weights_only`` takes classes under other names: from PyTorch 2.6 on."""
    return is_at_least('2.6.0')


def default_autocast_dtype(device_type: str) -> torch.dtype:
    """The dtype that autocast casts to by default, which PyTorch reports from 2.4 on."""
    if hasattr(torch, 'get_autocast_dtype'):
        return torch.get_autocast_dtype(device_type)
    return torch.float16  # on every device but the CPU


def view_as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View the memory of a flat, contiguous tensor as another dtype, also of another size.

    ``Tensor.view(dtype)`` can do it from PyTorch 1.11 on; in 1.10 only host tensors are possible.
    """
    if _views_change_sizes():
        return tensor.view(dtype)
    if not tensor.numel():
        return torch.empty(0, dtype=dtype)
    size = tensor.element_size()
    plain = tensor.detach().view(_INTEGERS[size]) if size in _INTEGERS else tensor.detach()
    return torch.frombuffer(plain.numpy(), dtype=dtype)
