"""Deserialize received samples and move their tensors to the requested device."""

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import msgpack
import torch
from torch import Tensor

from mmdevplug.accelerators.move_nested import move_tensors
from mmdevplug.distributed.byte_exchange import to_bytes
from mmdevplug.errors import SampleError
from mmdevplug.utils.torch_compat import view_as_dtype

from .serialize import LARGE_BYTES, VERSION, aligned, bytes_of, itemsize, places_of
from .unflatten import Plan


class ReceivedSamples(NamedTuple):
    """Samples of another rank, their blocks not yet copied.

    Attributes:
        plans (List[Plan]): How to build samples of each structure.
        kinds (List[Tuple[int, int]]): For each sample the numbers of its structure and shapes.
        shapes (List[tuple]): The shapes of the blocks of samples.
        values (list): Plain values in order.
        blocks (List[Tensor]): In order; large ones are still to be filled, the others are views
            of the received buffer.
        arrays (Set[int]): Indices of the blocks that are arrays.
        large (Set[int]): Indices of the large blocks.
    """

    plans: List[Plan]
    kinds: List[Tuple[int, int]]
    shapes: List[Tuple]
    values: List[Any]
    blocks: List[Tensor]
    arrays: Set[int]
    large: Set[int]

    def to_fill(self) -> List[Tensor]:
        """The memory of large tensors, in the order of ``SerializedSamples.large``."""
        return [bytes_of(self.blocks[index]) for index in sorted(self.large)]


class Header(NamedTuple):
    """The header of a message: an error, or the fields of :class:`.flatten.FlatSamples`.

    The blocks start at ``begin``.
    """

    error: Optional[str]
    structures: List[Any]
    shapes: List[Any]
    kinds: List[int]
    values: List[Any]
    begin: int


def read_header(buffer: Tensor) -> Header:
    """Read the header of what ``serialize`` or ``serialize_error`` returned on another rank."""
    length = int.from_bytes(to_bytes(buffer[:8]), 'little')
    header = msgpack.unpackb(to_bytes(buffer[8 : 8 + length]), unicode_errors='surrogatepass')
    if not isinstance(header, list) or len(header) not in (2, 5) or header[0] != VERSION:
        raise corrupt_data()
    if len(header) == 2:
        return Header(header[1], [], [], [], [], 0)
    return Header(None, *header[1:], aligned(8 + length))


def deserialize(
    buffer: Tensor,
    header: Header,
    allow_pickle: bool = False,
    more: Optional[int] = None,
    large_bytes: float = LARGE_BYTES,
) -> ReceivedSamples:
    """Read samples from a message; large tensors, of ``more`` bytes, are still to be filled.

    Raises:
        SampleError: If the message is inconsistent, or names classes unknown here.
    """
    _, structures, shapes, kinds, values, begin = header
    plans = [Plan.of(structure, allow_pickle) for structure in structures]
    pairs = list(zip(kinds[::2], kinds[1::2]))
    shapes = [tuple([tuple(shape) for shape in each]) for each in shapes]
    pieces = _list_pieces(plans, pairs, shapes)
    large = {i for i, piece in enumerate(pieces) if piece.shape and piece.bytes >= large_bytes}
    if more is not None and more != sum(pieces[index].bytes for index in large):
        raise corrupt_data()
    small = iter(_cut(buffer, begin, [p for i, p in enumerate(pieces) if i not in large]))
    blocks = [
        torch.empty(piece.shape, dtype=piece.dtype, device=buffer.device)
        if i in large
        else next(small)
        for i, piece in enumerate(pieces)
    ]
    arrays = {index for index, piece in enumerate(pieces) if piece.shape is None}
    return ReceivedSamples(plans, pairs, shapes, values, blocks, arrays, large)


class _Piece(NamedTuple):
    """A block in the buffer; the shape of an array is None."""

    dtype: torch.dtype
    elements: int
    shape: Optional[Tuple[int, ...]]

    @property
    def bytes(self) -> int:
        return self.elements * itemsize(self.dtype)


def _list_pieces(
    plans: Sequence[Plan], kinds: Sequence[Tuple[int, int]], shapes: Sequence[Tuple]
) -> List[_Piece]:
    of_kind: Dict[Tuple[int, int], List[_Piece]] = {}
    for kind in dict.fromkeys(kinds):
        types, sizes = plans[kind[0]].blocks, shapes[kind[1]]
        if len(types) != len(sizes):
            raise corrupt_data()
        of_kind[kind] = [
            _Piece(each.dtype, each.elements(shape), None if each.is_array else shape)
            for each, shape in zip(types, sizes)
        ]
    return [piece for kind in kinds for piece in of_kind[kind]]


def _cut(buffer: Tensor, begin: int, pieces: Sequence[_Piece]) -> List[Tensor]:
    wanted: Dict[torch.dtype, List[_Piece]] = {}
    for piece in pieces:
        wanted.setdefault(piece.dtype, []).append(piece)
    totals = [(dtype, sum([piece.elements for piece in group])) for dtype, group in wanted.items()]
    places = places_of(begin, totals)
    if places[-1] != buffer.numel():
        raise corrupt_data()
    cut: Dict[torch.dtype, Iterator[Tensor]] = {}
    for (dtype, total), place in zip(totals, places):
        run = view_as_dtype(buffer[place : place + total * itemsize(dtype)], dtype)
        cut[dtype] = iter(_split(run, wanted[dtype]))
    return [next(cut[piece.dtype]) for piece in pieces]


def _split(run: Tensor, pieces: Sequence[_Piece]) -> Sequence[Tensor]:
    first = pieces[0]
    if first.shape is not None and first.elements and pieces.count(first) == len(pieces):
        return run.view(len(pieces), *first.shape).unbind()
    parts = run.split([piece.elements for piece in pieces])
    return [
        part if piece.shape is None else part.view(piece.shape)
        for part, piece in zip(parts, pieces)
    ]


def move_blocks(received: Sequence[ReceivedSamples], device: torch.device) -> List[List[Tensor]]:
    """Copy the blocks of each rank to a device in one call; those of arrays to the host."""
    tensors = [
        block for each in received for i, block in enumerate(each.blocks) if i not in each.arrays
    ]
    moved = iter(move_tensors(tensors, device))

    def move(each: ReceivedSamples, index: int) -> Tensor:
        block = each.blocks[index]
        if index in each.arrays:
            return block.cpu()
        tensor = next(moved)
        # A view would keep the whole buffer in memory.
        return tensor.clone() if tensor is block and index not in each.large else tensor

    return [[move(each, index) for index in range(len(each.blocks))] for each in received]


def rebuild_samples(received: ReceivedSamples, blocks: Sequence[Tensor]) -> List[Any]:
    """Rebuild the samples from blocks that :func:`move_blocks` returned."""
    shapes = [shape for _, number in received.kinds for shape in received.shapes[number]]
    values, pieces = iter(received.values), iter(zip(blocks, shapes))
    return [received.plans[number].build(values, pieces) for number, _ in received.kinds]


def corrupt_data() -> SampleError:
    """The error for a message that this release did not write."""
    return SampleError(
        'a rank sent samples whose parts do not fit together. Install the same release of '
        'mmdevplug on all ranks.'
    )
