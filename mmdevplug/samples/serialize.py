"""Serialize samples into one buffer, and read those of other ranks from theirs.

A buffer is a header in msgpack, then tensors packed by dtype:

    length of the header (8 bytes) | header | padding | all blocks of one dtype | padding | ...

Samples that are all alike are serialized as one sample whose leaves are columns: a column of
numbers is the bytes of an array, a column of tensors is one block, the tensors stacked.

Large tensors are not in it. They are sent separately, without a copy, in the order of the samples.
"""

from array import array
from functools import lru_cache
from itertools import accumulate, chain
from math import inf, prod
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import msgpack
import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators import to_device
from mmdevplug.accelerators.move_nested import move_tensors
from mmdevplug.distributed.byte_exchange import to_tensor
from mmdevplug.errors import SampleError
from mmdevplug.utils.torch_compat import view_as_dtype

from .columns import NUMBERS, PLAIN_WORDS
from .flatten import FlatSamples
from .structures import LARGE_BYTES
from .unflatten import Plan

VERSION = 2
#: Blocks of one dtype start at multiples of this, so that any dtype can be read there.
ALIGNMENT = 64


class SerializedSamples(NamedTuple):
    """Samples to send: the buffer and the large tensors, as uint8 tensors on the host."""

    data: Tensor
    large: List[Tensor]

    @property
    def more(self) -> int:
        """The bytes of large tensors."""
        return sum(tensor.numel() for tensor in self.large)


def serialize(parts: FlatSamples, large_bytes: float = LARGE_BYTES) -> SerializedSamples:
    """Serialize samples; tensors of ``large_bytes`` and more stay separate."""
    by_dtype: Dict[torch.dtype, List[Any]] = {}
    large: List[Tensor] = []
    for block, on_host in zip(parts.blocks, _on_host(parts.blocks)):
        if isinstance(on_host, list):
            by_dtype.setdefault(on_host[0].dtype, []).append(on_host)
        elif not parts.rows and isinstance(block, Tensor) and _bytes(on_host) >= large_bytes:
            large.append(bytes_of(on_host.contiguous()))
        else:
            by_dtype.setdefault(on_host.dtype, []).append(on_host.reshape(-1))
    values = [each.tobytes() if isinstance(each, array) else each for each in parts.values]
    header = msgpack.packb(
        [VERSION, list(parts.structures), list(parts.shapes), parts.kinds, values, parts.rows],
        unicode_errors='surrogatepass',
    )
    begin = aligned(8 + len(header))
    sizes = [sum(map(_elements, group)) for group in by_dtype.values()]
    places = places_of(begin, list(zip(by_dtype, sizes)))
    buffer = torch.empty(places[-1], dtype=torch.uint8)
    buffer[: 8 + len(header)] = to_tensor(len(header).to_bytes(8, 'little') + header)
    buffer[8 + len(header) : begin] = 0
    for (dtype, group), place, size in zip(by_dtype.items(), places, sizes):
        if size:
            end = place + size * itemsize(dtype)
            _write(group, view_as_dtype(buffer[place:end], dtype))
            buffer[end : aligned(end)] = 0
    return SerializedSamples(buffer, large)


def _elements(block: Union[Tensor, List[Tensor]]) -> int:
    """The elements of a block, or of a column of blocks of one shape."""
    return block.numel() if isinstance(block, Tensor) else len(block) * block[0].numel()


def _write(group: List[Any], run: Tensor) -> None:
    """Copy blocks and columns of blocks into a buffer of their dtype."""
    if all(isinstance(block, Tensor) for block in group):
        torch.cat(group, out=run)
        return
    for block, part in zip(group, run.split([_elements(block) for block in group])):
        if isinstance(block, Tensor):
            part.copy_(block)
        elif part.numel():
            torch.stack(block, out=part.view(len(block), *block[0].shape))


def serialize_error(message: str) -> SerializedSamples:
    """Serialize the reason why there are no samples."""
    header = msgpack.packb([VERSION, message], unicode_errors='surrogatepass')
    return SerializedSamples(to_tensor(len(header).to_bytes(8, 'little') + header), [])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _on_host(blocks: Sequence[Union[Tensor, np.ndarray, List[Tensor]]]) -> List[Any]:
    tensors = [
        to_tensor(block.tobytes()) if isinstance(block, np.ndarray) else block for block in blocks
    ]
    # One call, and so one execution on a lazy device.
    return to_device(tensors, 'cpu')


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8."""
    return view_as_dtype(tensor.view(-1), torch.uint8)


def places_of(begin: int, totals: Sequence[Tuple[torch.dtype, int]]) -> List[int]:
    """The start of the blocks of each dtype, and the end of the last."""
    sizes = [aligned(total * itemsize(dtype)) for dtype, total in totals]
    return list(accumulate([begin, *sizes]))


def aligned(size: int) -> int:
    """Round up to the next place at which blocks may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=None)
def itemsize(dtype: torch.dtype) -> int:
    """Bytes of an element."""
    return torch.empty(0, dtype=dtype).element_size()


class _Piece(NamedTuple):
    """A block: its elements in the buffer, and the shape of its tensor or array."""

    dtype: torch.dtype
    elements: int
    shape: Tuple[int, ...]
    is_array: bool
    is_large: bool


class ReceivedSamples(NamedTuple):
    """Samples of another rank, their blocks not yet copied."""

    plans: List[Plan]  # how to build each sample
    values: List[Any]  # plain values in order
    #: In order; large ones are still to be filled, the others are views of the received buffer.
    blocks: List[Tensor]
    pieces: List[_Piece]  # what each block is

    def to_fill(self) -> List[Tensor]:
        """The memory of large tensors, in the order of ``SerializedSamples.large``."""
        pairs = zip(self.blocks, self.pieces)
        return [bytes_of(block) for block, piece in pairs if piece.is_large]


class Header(NamedTuple):
    """The header of a message: an error, or the fields of :class:`.flatten.FlatSamples`."""

    error: Optional[str]
    structures: List[Any]
    shapes: List[Any]
    kinds: List[int]
    values: List[Any]
    rows: int
    begin: int  # where the blocks start


def read_header(buffer: Tensor) -> Header:
    """Read the header of what ``serialize`` or ``serialize_error`` returned on another rank."""
    data = memoryview(buffer.cpu().numpy())
    length = int.from_bytes(data[:8], 'little')
    header = msgpack.unpackb(data[8 : 8 + length], unicode_errors='surrogatepass')
    if not isinstance(header, list) or len(header) not in (2, 6) or header[0] != VERSION:
        raise corrupt_data()
    if len(header) == 2:
        return Header(header[1], [], [], [], [], 0, 0)
    return Header(None, *header[1:], aligned(8 + length))


def deserialize(
    buffer: Tensor,
    header: Header,
    allow_pickle: bool = False,
    more: Optional[int] = None,
    large_bytes: float = LARGE_BYTES,
) -> ReceivedSamples:
    """Read samples from a message; large tensors, of ``more`` bytes, are still to be filled."""
    if header.rows:
        if more:
            raise corrupt_data()
        return read_columns(buffer, header).list_samples()
    _, structures, shapes, kinds, values, _, begin = header
    plans = [Plan.of(structure, allow_pickle) for structure in structures]
    pairs = list(zip(kinds[::2], kinds[1::2]))
    shapes = [tuple([tuple(shape) for shape in each]) for each in shapes]
    pieces = _list_pieces(plans, pairs, shapes, large_bytes)
    large = [piece for piece in pieces if piece.is_large]
    if more is not None and more != sum(p.elements * itemsize(p.dtype) for p in large):
        raise corrupt_data()
    small = iter(_cut(buffer, begin, [piece for piece in pieces if not piece.is_large]))
    blocks = [
        torch.empty(piece.shape, dtype=piece.dtype, device=buffer.device)
        if piece.is_large
        else next(small)
        for piece in pieces
    ]
    return ReceivedSamples([plans[number] for number, _ in pairs], values, blocks, pieces)


class ReceivedColumns(NamedTuple):
    """Samples of another rank that are all alike, their blocks not yet copied."""

    plan: Plan
    rows: int  # how many samples
    values: List[Any]  # of each column: the bytes of an array, a list, or None
    blocks: List[Tensor]  # of each column the stacked tensors, a view of the received buffer

    def list_samples(self) -> ReceivedSamples:
        """The same samples one by one."""
        columns = [_list_values(*each, self.rows) for each in zip(self.plan.values, self.values)]
        kind = [
            _Piece(block.dtype, block[0].numel(), tuple(block.shape[1:]), False, False)
            for block in self.blocks
        ]
        return ReceivedSamples(
            [self.plan] * self.rows,
            list(chain.from_iterable(zip(*columns))),
            list(chain.from_iterable(zip(*[block.unbind() for block in self.blocks]))),
            kind * self.rows,
        )


def read_columns(buffer: Tensor, header: Header, plan: Optional[Plan] = None) -> ReceivedColumns:
    """Read samples from a message in columns; ``plan`` is that of its structure, if known."""
    if len(header.structures) != 1 or len(header.shapes) != 1:
        raise corrupt_data()
    rows = header.rows
    plan = plan or Plan.of(header.structures[0], allow_pickle=False)
    shapes = [(rows, *shape) for shape in header.shapes[0]]
    pieces = _list_pieces([plan], [(0, 0)], [shapes], inf)
    if len(plan.values) != len(header.values) or any(piece.is_array for piece in pieces):
        raise corrupt_data()
    for word, values in zip(plan.values, header.values):
        kind, size = (bytes, itemsize(NUMBERS[word][1])) if word in NUMBERS else (list, 1)
        fits = isinstance(values, kind) and len(values) == rows * size
        if word not in PLAIN_WORDS or not (fits or word == 'None'):
            raise corrupt_data()
    return ReceivedColumns(plan, rows, header.values, _cut(buffer, header.begin, pieces))


def _list_values(word: str, values: Any, rows: int) -> List[Any]:
    if word == 'None':
        return [None] * rows
    if word == 'bool':
        return list(map(bool, values))
    return array(NUMBERS[word][0], values).tolist() if word in NUMBERS else values


def _list_pieces(
    plans: Sequence[Plan],
    kinds: Sequence[Tuple[int, int]],
    shapes: Sequence[Tuple],
    large_bytes: float,
) -> List[_Piece]:
    of_kind: Dict[Tuple[int, int], List[_Piece]] = {}
    for kind in dict.fromkeys(kinds):
        types, sizes = plans[kind[0]].blocks, shapes[kind[1]]
        if len(types) != len(sizes):
            raise corrupt_data()
        of_kind[kind] = []
        for (dtype, size, is_array), shape in zip(types, sizes):
            elements = prod(shape) * (size if is_array else 1)
            is_large = bool(shape) and not is_array and elements * size >= large_bytes
            of_kind[kind].append(_Piece(dtype, elements, shape, is_array, is_large))
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
    if not first.is_array and first.elements and pieces.count(first) == len(pieces):
        return run.view(len(pieces), *first.shape).unbind()
    parts = run.split([piece.elements for piece in pieces])
    return [
        part if piece.is_array else part.view(piece.shape) for part, piece in zip(parts, pieces)
    ]


def rebuild_samples(received: Sequence[ReceivedSamples], device: torch.device) -> List[List[Any]]:
    """Rebuild the samples of each rank; all tensors are copied to a device in one call."""
    pairs = [pair for each in received for pair in zip(each.blocks, each.pieces)]
    moved = iter(move_tensors([block for block, piece in pairs if not piece.is_array], device))

    def move(block: Tensor, piece: _Piece) -> Tuple[Tensor, Tuple[int, ...]]:
        if piece.is_array:
            return block.cpu(), piece.shape
        tensor = next(moved)
        # A view would keep the whole buffer in memory.
        return (tensor.clone() if tensor is block and not piece.is_large else tensor), piece.shape

    rebuilt = []
    for each in received:
        blocks = iter([move(*pair) for pair in zip(each.blocks, each.pieces)])
        values = iter(each.values)
        rebuilt.append([plan.build(values, blocks) for plan in each.plans])
    return rebuilt


def corrupt_data() -> SampleError:
    """The error for a message that this release did not write."""
    return SampleError(
        'a rank sent samples whose parts do not fit together. Install the same release of '
        'mmdevplug on all ranks.'
    )
