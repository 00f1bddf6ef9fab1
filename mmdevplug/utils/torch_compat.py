"""Differences between releases of PyTorch, with the release that makes each one unnecessary."""

from functools import lru_cache

import torch
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


def memory_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of a flat, contiguous tensor, as one of another dtype.

    Args:
        tensor (Tensor): With one dimension; under PyTorch 1.10 on the host.
        dtype (torch.dtype): Its elements may have another size.

    Returns:
        Tensor: In the same memory.
    """
    if _views_change_sizes():
        return tensor.view(dtype)
    if not tensor.numel():
        return torch.empty(0, dtype=dtype)
    size = tensor.element_size()
    plain = tensor.detach().view(_INTEGERS[size]) if size in _INTEGERS else tensor.detach()
    return torch.frombuffer(plain.numpy(), dtype=dtype)
