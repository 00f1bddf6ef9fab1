"""Divide gradients into buckets: pieces of host memory that are averaged in one message each."""

from typing import Dict, List, NamedTuple, Sequence

import torch
from torch import Tensor

#: Half precision is summed in float32: gloo of older releases lacks it, and it loses bits.
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Bucket(NamedTuple):
    """Hold gradients that are averaged together, in host memory.

    Its methods are those of ``torch.distributed.GradBucket``, for PyTorch's hooks.
    """

    flat: Tensor  # one-dimensional
    views: List[Tensor]  # for each gradient a piece of `flat` in its shape
    number: int = 0  # index of the bucket in its iteration
    indices: List[int] = []  # of the parameters

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> List[Tensor]:
        # PowerSGD takes the first dimension of each, and a scalar has none.
        return [view if view.dim() else view.view(1) for view in self.views]

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        # Hooks count iterations by it. The number of buckets is known only after backward.
        return self.number == 0


def numel_by_dtype(parameters: Sequence[Tensor]) -> Dict[torch.dtype, int]:
    """Count the elements of all gradients in host memory, for each dtype."""
    sizes: Dict[torch.dtype, int] = {}
    for parameter in parameters:
        dtype = _wire_dtype(parameter)
        sizes[dtype] = sizes.get(dtype, 0) + _wire_numel(parameter)
    return sizes


class BucketLayout:
    """Place gradients in host memory, one tensor for each dtype, see :func:`numel_by_dtype`.

    A bucket is full when it has at least ``bucket_bytes``.
    """

    def __init__(
        self, parameters: Sequence[Tensor], memory: Dict[torch.dtype, Tensor], bucket_bytes: int
    ) -> None:
        self.parameters = parameters
        self.memory = memory
        self.bucket_bytes = bucket_bytes

    def divide(self, indices: Sequence[int], after: Sequence[Bucket] = ()) -> List[Bucket]:
        """Divide the gradients with these indices, in this order, into buckets.

        The buckets ``after`` occupy the first part of the memory, and their numbers come first.
        """
        buckets: List[Bucket] = []
        # float32 first: PowerSGD counts iterations by the bucket with number 0.
        for dtype in sorted(self.memory, key=lambda dtype: dtype != torch.float32):
            memory = self.memory[dtype]
            start = end = sum(b.flat.numel() for b in after if b.flat.dtype == dtype)
            group: List[int] = []
            chosen = [i for i in indices if _wire_dtype(self.parameters[i]) == dtype]
            for index in chosen:
                group.append(index)
                end += _wire_numel(self.parameters[index])
                full = (end - start) * memory.element_size() >= self.bucket_bytes
                if full or index == chosen[-1]:
                    flat, parameters = memory[start:end], [self.parameters[i] for i in group]
                    pieces = flat.split([_wire_numel(parameter) for parameter in parameters])
                    views = [_view_like(piece, p) for piece, p in zip(pieces, parameters)]
                    buckets.append(Bucket(flat, views, len(after) + len(buckets), group))
                    group, start = [], end
        return buckets


def _wire_dtype(parameter: Tensor) -> torch.dtype:
    if parameter.is_complex():
        return torch.float64 if parameter.dtype == torch.complex128 else torch.float32
    return _SUMMED_IN.get(parameter.dtype, parameter.dtype)


def _wire_numel(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _view_like(piece: Tensor, parameter: Tensor) -> Tensor:
    if parameter.is_complex():
        return torch.view_as_complex(piece.view(*parameter.shape, 2))
    return piece.view(parameter.shape)
