"""Exchange byte buffers of different lengths between ranks without padding.

The first message is as long on every rank, and short. It holds the length of the rank's buffer and
its beginning, which mostly is all of it: it is made as long as the last buffers of the group were.
The rank broadcasts the rest in pieces, several at a time: unlike an all-gather, that needs no
padding to the longest buffer and no copy out of a common one, and over gloo it takes a third of
the time for large buffers.
"""

import os
import struct
from itertools import zip_longest
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.distributed.rank_device import group_device
from mmdevplug.errors import SampleError
from mmdevplug.fault_tolerance.failure import known_to_all
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.torch_compat import get_global_rank

#: Bytes of the first message of each rank, unless the last buffers of a group were longer.
FIRST_BYTES = 1024
#: The most that it may have. Over gloo an all-gather of 1 MB takes as long as 1 KB and broadcasts.
_MOST_FIRST_BYTES = 256 << 10
#: Up to this size, padding to the longest buffer costs less than broadcasts.
_PADDED_BYTES = 64 << 10
DEFAULT_IN_FLIGHT = 64 << 20
#: Samples up to this size are not compared with the free memory.
_UNCHECKED_BYTES = 256 << 20
_SMALLEST_PIECE = 64 << 10

_HEAD = struct.Struct('<4s12sQQQ8x')
_LENGTH = struct.Struct('<Q8x')  # a multiple of 16, as _HEAD: any dtype can be read behind it
_MAGIC = b'mmds'
_NO_LIMIT = 2**63 - 1
#: For each group the bytes of the next first message. All ranks have seen the same lengths.
_first_bytes: 'WeakKeyDictionary[Any, int]' = WeakKeyDictionary()


class Head(NamedTuple):
    """The header of a rank's first message."""

    call_tag: str  # what is exchanged, the same on all ranks
    size: int  # bytes of its buffer
    in_flight: int  # bytes that may be in flight at a time
    limit: int  # bytes that this rank accepts from all ranks together


def global_rank(group: AnyGroup, rank: int) -> int:
    """The rank in the whole job of a rank of a group."""
    if group is None or group is torch_dist.group.WORLD:
        return rank
    return get_global_rank(group, rank)


def to_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def to_bytes(data: Tensor) -> bytes:
    """The bytes of a uint8 tensor."""
    return data.cpu().numpy().tobytes()


def gather_bytes(
    data: Tensor,
    group: AnyGroup = None,
    call_tag: str = '',
    in_flight: int = DEFAULT_IN_FLIGHT,
    limit: Optional[int] = None,
) -> List[Tensor]:
    """Give every rank the bytes of all ranks: one-dimensional uint8 tensors of any length.

    ``call_tag`` has at most 12 letters, the same on all ranks. The smallest of the ranks counts of
    ``in_flight``, the bytes that may be in flight at a time, and of ``limit``, the bytes that all
    ranks together may have (None for the free memory).

    Raises:
        SampleError: On all ranks, if there are more bytes than that or the call tags differ.
    """
    place = group_device(group)
    data = data.to(place)
    limit = _NO_LIMIT if limit is None else limit
    head = _HEAD.pack(_MAGIC, call_tag.encode(), data.numel(), min(in_flight, _NO_LIMIT), limit)
    key = torch_dist.group.WORLD if group is None else group
    first = _first_bytes.get(key, FIRST_BYTES)
    blocks = all_gather(_first_message(head, data, first), group)
    heads = [_read_head(to_bytes(block[: _HEAD.size])) for block in blocks]
    _first_bytes[key] = _next_first_bytes(heads)
    try:
        _check(heads, call_tag, group)
    except SampleError as error:
        raise known_to_all(error) from None
    here = torch_dist.get_rank(group)
    parts = [
        data if rank == here else _beginning(block[_HEAD.size :], head.size)
        for rank, (block, head) in enumerate(zip(blocks, heads))
    ]
    room = first - _HEAD.size
    if any(head.size > room for head in heads):
        smallest = min(head.in_flight for head in heads)
        _broadcast_rest([part[room:] for part in parts], group, smallest)
    return parts


def _next_first_bytes(heads: Sequence[Head]) -> int:
    """Bytes that hold buffers a little longer than these, if sending them at once pays."""
    sizes = [head.size + _HEAD.size for head in heads]
    longest, ranks = max(sizes), len(sizes)
    most = _piece_bytes(min(head.in_flight for head in heads), ranks)
    wanted = -(-(longest + longest // 16) // FIRST_BYTES) * FIRST_BYTES
    pays = longest <= _PADDED_BYTES or longest * ranks <= 2 * sum(sizes)
    return wanted if pays and wanted <= min(most, _MOST_FIRST_BYTES) else FIRST_BYTES


def _first_message(head: bytes, data: Tensor, size: int = FIRST_BYTES) -> Tensor:
    text = head + to_bytes(data[: size - len(head)])
    return to_tensor(text.ljust(size, b'\0')).to(data.device)


def _read_head(text: bytes) -> Head:
    magic, call_tag, *numbers = _HEAD.unpack(text)
    if magic != _MAGIC:
        raise SampleError(
            'a rank sent something else than samples: some ranks have called another collective. '
            'All ranks must call gather_samples() and balance_samples() in the same order.'
        )
    return Head(call_tag.rstrip(b'\0').decode(), *numbers)


def _check(heads: Sequence[Head], call_tag: str, group: AnyGroup) -> None:
    for rank, head in enumerate(heads):
        if head.call_tag != heads[0].call_tag:
            raise SampleError(
                f'rank {rank} calls {head.call_tag!r} while rank 0 calls {heads[0].call_tag!r} '
                '(a + stands for allow_pickle=True, a * for same_structure=False, a # for '
                'stacked=True); expected the same call with the same options on all ranks, in '
                'the same order.'
            )
    total = sum(head.size for head in heads)
    limit = min(head.limit for head in heads)
    limited_by = 'max_bytes'
    if limit == _NO_LIMIT and total > _UNCHECKED_BYTES:
        limit, limited_by = _free_memory(group), 'the memory that is free for it'
    if total > limit:
        largest = max(range(len(heads)), key=lambda rank: heads[rank].size)
        raise SampleError(
            f'{call_tag}: the samples of all ranks are {total:,} bytes together, more than '
            f'{limited_by}, {limit:,} bytes; rank {largest} has the most, '
            f'{heads[largest].size:,}. Gather fewer or smaller samples, share them out with '
            f'balance_samples(), or raise max_bytes.'
        )


def _free_memory(group: AnyGroup) -> int:
    """The bytes of host memory that each rank may fill, the smallest over all ranks."""
    sharers = int(os.environ.get('LOCAL_WORLD_SIZE', 0)) or torch_dist.get_world_size(group)
    free = torch.tensor([psutil.virtual_memory().available // sharers])
    return min(int(each) for each in all_gather(free.to(group_device(group)), group))


def _beginning(received: Tensor, size: int) -> Tensor:
    known = received.numel()
    if size <= known:
        return received[:size]
    part = torch.empty(size, dtype=torch.uint8, device=received.device)
    part[:known] = received
    return part


def _broadcast_rest(parts: Sequence[Tensor], group: AnyGroup, in_flight: int) -> None:
    """Broadcast the bytes of each rank, in place."""
    most = _piece_bytes(in_flight, len(parts))
    pending: List[Any] = []  # works and their bytes
    in_transit = 0
    # Ranks take turns, so that all of them send at the same time.
    for turn in zip_longest(*(_pieces([part], most) for part in parts)):
        for rank, piece in enumerate(turn):
            if piece is None:
                continue
            while pending and in_transit + piece.numel() > in_flight:
                work, size = pending.pop(0)
                work.wait()
                in_transit -= size
            source = global_rank(group, rank)
            work = torch_dist.broadcast(piece, source, group=group, async_op=True)
            pending.append((work, piece.numel()))
            in_transit += piece.numel()
    for work, _ in pending:
        work.wait()


def _piece_bytes(in_flight: int, ranks: int) -> int:
    return max(_SMALLEST_PIECE, in_flight // ranks)


def _pieces(tensors: Sequence[Tensor], most: int) -> Iterator[Tensor]:
    for tensor in tensors:
        for begin in range(0, tensor.numel(), most):
            yield tensor[begin : begin + most]


def exchange_bytes(
    outgoing: Mapping[int, Tensor],
    sources: Sequence[int],
    group: AnyGroup = None,
    in_flight: int = DEFAULT_IN_FLIGHT,
) -> Dict[int, Tensor]:
    """Send a uint8 tensor to each of some ranks, and receive those of the ranks in ``sources``."""
    place = group_device(group)
    sent = {rank: data.to(place) for rank, data in outgoing.items()}
    first = {rank: torch.empty(FIRST_BYTES, dtype=torch.uint8, device=place) for rank in sources}
    messages = {
        rank: [_first_message(_LENGTH.pack(data.numel()), data)] for rank, data in sent.items()
    }
    swap_pieces(messages, {rank: [block] for rank, block in first.items()}, group, in_flight)
    received = {}
    for rank, block in first.items():
        (size,) = _LENGTH.unpack(to_bytes(block[: _LENGTH.size]))
        received[rank] = _beginning(block[_LENGTH.size :], size)
    room = FIRST_BYTES - _LENGTH.size
    swap_pieces(
        {rank: [data[room:]] for rank, data in sent.items()},
        {rank: [data[room:]] for rank, data in received.items()},
        group,
        in_flight,
    )
    return received


def swap_pieces(
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Tensor]],
    group: AnyGroup,
    in_flight: int,
) -> None:
    """Send one-dimensional uint8 tensors to some ranks while those in ``incoming`` are received.

    Tensors in ``incoming`` have the sizes that their ranks send. ``in_flight`` is the same on all
    ranks.
    """
    most = _piece_bytes(in_flight, torch_dist.get_world_size(group))
    sends = [(torch_dist.isend, rank, tensors) for rank, tensors in outgoing.items()]
    receives = [(torch_dist.irecv, rank, tensors) for rank, tensors in incoming.items()]
    ways = sends + receives
    # As many pieces at a time as may be in flight; the same on both ends.
    batches = [group_by_bytes(_pieces(tensors, most), most) for _, _, tensors in ways]
    for turn in zip_longest(*batches, fillvalue=()):
        operations = [
            torch_dist.P2POp(operation, data, global_rank(group, rank), group)
            for (operation, rank, _), batch in zip(ways, turn)
            for data in batch
        ]
        for work in torch_dist.batch_isend_irecv(operations):
            work.wait()


def group_by_bytes(tensors: Iterable[Tensor], most: int) -> Iterator[List[Tensor]]:
    """Group consecutive tensors of one device, up to ``most`` bytes; a larger one is alone."""
    group: List[Tensor] = []
    size = 0
    for tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if group and (size + bytes_ > most or tensor.device != group[0].device):
            yield group
            group, size = [], 0
        group.append(tensor)
        size += bytes_
    if group:
        yield group


def all_gather(tensor: Tensor, group: AnyGroup = None) -> List[Tensor]:
    """Tensors of the same shape from all ranks, in the order of ranks."""
    gathered = [torch.empty_like(tensor) for _ in range(torch_dist.get_world_size(group))]
    torch_dist.all_gather(gathered, tensor, group=group)
    return gathered
