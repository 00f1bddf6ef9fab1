"""Divide gradients into buckets: pieces of host memory that are averaged in one message each."""

from typing import Dict, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

#: Half precision is summed in float32: gloo of older releases lacks it, and it loses bits.
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Bucket(NamedTuple):
    """Gradients of one dtype that are averaged together."""

    dtype: torch.dtype  # on the wire
    numel: int
    indices: List[int]  # of the parameters
    starts: List[int]  # where the gradient of each begins

    def views(self, flat: Tensor, parameters: Sequence[Tensor]) -> List[Tensor]:
        """For each gradient its piece of a flat tensor, in its shape."""
        stops = [*self.starts[1:], self.numel]
        return [
            view_like(flat[start:stop], parameters[index])
            for index, start, stop in zip(self.indices, self.starts, stops)
        ]


def divide(
    parameters: Sequence[Tensor],
    indices: Sequence[int],
    bucket_bytes: int,
    compressed_to: Optional[torch.dtype] = None,
) -> List[Bucket]:
    """Divide the gradients with these indices, in this order, into buckets.

    A bucket is full when it has at least ``bucket_bytes``. Gradients of float32 travel as
    ``compressed_to``, if given.
    """
    by_dtype: Dict[torch.dtype, List[int]] = {}
    for index in indices:
        by_dtype.setdefault(_wire_dtype(parameters[index]), []).append(index)
    buckets: List[Bucket] = []
    for dtype in by_dtype:
        wire = compressed_to if compressed_to is not None and dtype == torch.float32 else dtype
        element_size = torch.empty(0, dtype=dtype).element_size()
        group: List[int] = []
        starts: List[int] = []
        numel = 0
        for index in by_dtype[dtype]:
            group.append(index)
            starts.append(numel)
            numel += wire_numel(parameters[index])
            if numel * element_size >= bucket_bytes or index == by_dtype[dtype][-1]:
                buckets.append(Bucket(wire, numel, group, starts))
                group, starts, numel = [], [], 0
    return buckets


def _wire_dtype(parameter: Tensor) -> torch.dtype:
    if parameter.is_complex():
        return torch.float64 if parameter.dtype == torch.complex128 else torch.float32
    return _SUMMED_IN.get(parameter.dtype, parameter.dtype)


def wire_numel(parameter: Tensor) -> int:
    """The number of real values of a gradient."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def view_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """View a flat piece of a bucket in the shape of a gradient."""
    if parameter.is_complex():
        return torch.view_as_complex(piece.view(*parameter.shape, 2))
    return piece.view(parameter.shape)
