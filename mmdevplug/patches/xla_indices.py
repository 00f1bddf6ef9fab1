"""Give NaN for labels and indices that torch_xla takes and no other device does.

A label that is no class has a loss of 0 there, and an index behind the end is the last one,
without a word; the CPU raises an error, for which the host would have to wait for every batch.
"""

from functools import wraps
from typing import Any, Callable, Optional

import torch
from torch import Tensor


def checking_labels(loss: Callable) -> Callable:
    """Give NaN as the loss, and as its gradient, of a label that is no class."""

    @wraps(loss)
    def checked(
        input: Tensor,
        target: Tensor,
        weight: Optional[Tensor] = None,
        size_average: Optional[bool] = None,
        ignore_index: int = -100,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        found = loss(input, target, weight, size_average, ignore_index, *args, **kwargs)
        if input.device.type != 'xla' or target.is_floating_point():
            return found
        outside = _outside(target, input.shape[1 if input.dim() > 1 else 0])
        outside = outside & (target != ignore_index)
        return found * _nan_where(outside if found.shape == target.shape else outside.any(), found)

    return checked


def checking_indices(embedding: Callable) -> Callable:
    """Give NaN as the embedding of an index that the table does not have."""

    @wraps(embedding)
    def checked(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = embedding(input, weight, *args, **kwargs)
        if input.device.type != 'xla':
            return found
        return found * _nan_where(_outside(input, len(weight)), found).unsqueeze(-1)

    return checked


def _outside(indices: Tensor, count: int) -> Tensor:
    return (indices < 0) | (indices >= count)


def _nan_where(mask: Tensor, like: Tensor) -> Tensor:
    """NaN there and 1 elsewhere, by which a gradient is multiplied as well."""
    return torch.ones_like(mask, dtype=like.dtype).masked_fill(mask, float('nan'))
