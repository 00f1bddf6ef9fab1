"""Exchange byte buffers of different lengths between ranks.

The first message is as long on every rank, and short. It holds the length of the rank's buffer and
its beginning, which mostly is all of it: it is made as long as the last buffers of the group were.
Each rank broadcasts the rest. Over gloo a padded all-gather of 10 MB takes twice as long on 2
ranks and five times as long on 4: it copies into a common buffer and out of it.
"""

import json
import os
import struct
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators.backend import group_device
from mmdevplug.errors import SampleError
from mmdevplug.fault_tolerance.failure import known_to_all
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.host import available_memory
from mmdevplug.utils.torch_compat import get_global_rank

from .group_values import values_of_group
from .wire import to_bytes, to_tensor

#: Bytes of the first message of each rank, unless the last buffers of a group were longer.
_FIRST_BYTES = 1024
#: The most that it may have. Over gloo an all-gather of 1 MB takes as long as 1 KB and broadcasts.
_MOST_FIRST_BYTES = 256 << 10
#: Of a single message; some backends count in 32 bits.
_MESSAGE_BYTES = 64 << 20
#: Samples up to this size are not compared with the free memory.
_UNCHECKED_BYTES = 256 << 20

_HEAD = struct.Struct('<4s12sQQ')
_MAGIC = b'mmds'
_NO_LIMIT = 2**63 - 1


def gather_bytes(
    data: Tensor, group: AnyGroup = None, call_tag: str = '', limit: Optional[int] = None
) -> List[Tensor]:
    """Give every rank the bytes of all ranks: one-dimensional uint8 tensors of any length.

    ``call_tag`` has at most 12 letters, the same on all ranks. The smallest ``limit`` of the ranks
    counts: the bytes that all ranks together may have (None for the free memory).

    Raises:
        SampleError: On all ranks, if there are more bytes than that or the call tags differ.
    """
    place = group_device(group)
    data = data.to(place)
    head = _HEAD.pack(_MAGIC, call_tag.encode(), data.numel(), limit or _NO_LIMIT)
    # The bytes of the next first message. All ranks have seen the same lengths.
    learned = values_of_group(group)
    room = learned.get('first_bytes', _FIRST_BYTES) - _HEAD.size
    first = to_tensor(head + to_bytes(data[:room]).ljust(room, b'\0'))
    blocks = all_gather(first.to(place), group)
    tags, sizes, limits = zip(*map(_read_head, blocks))
    longest = _HEAD.size + max(sizes)
    wanted = -(-(longest + longest // 16) // _FIRST_BYTES) * _FIRST_BYTES
    learned['first_bytes'] = wanted if wanted <= _MOST_FIRST_BYTES else _FIRST_BYTES
    try:
        _check(tags, sizes, min(limits), group)
    except SampleError as error:
        raise known_to_all(error) from None
    parts = []
    for rank, (block, size) in enumerate(zip(blocks, sizes)):
        part = block[_HEAD.size :][:size]
        if rank == torch_dist.get_rank(group):
            part = data
        elif size > room:
            part = torch.empty(size, dtype=torch.uint8, device=place)
            part[:room] = block[_HEAD.size :]
        parts.append(part)
    if max(sizes) <= room:
        return parts
    works = [
        torch_dist.broadcast(piece, get_global_rank(group, rank), group=group, async_op=True)
        for rank, part in enumerate(parts)
        for piece in _pieces(part[room:])
    ]
    for work in works:
        work.wait()
    return parts


def gather_json(value: object, group: AnyGroup = None) -> List[Any]:
    """Collect a value from all ranks as JSON, which runs no code; tuples have become lists."""
    data = to_tensor(json.dumps(value).encode())
    parts = gather_bytes(data, group, call_tag='gather_json')
    return list(map(json.loads, map(to_bytes, parts)))


def _read_head(block: Tensor) -> Tuple[str, int, int]:
    """Read what is exchanged, the bytes of a rank's buffer and the most that it accepts of all."""
    magic, call_tag, *numbers = _HEAD.unpack(to_bytes(block[: _HEAD.size]))
    if magic != _MAGIC:
        raise SampleError(
            'a rank sent something else than samples: some ranks have called another collective. '
            'All ranks must call gather_samples() and balance_samples() in the same order.'
        )
    return (call_tag.rstrip(b'\0').decode(), *numbers)


def _check(tags: Sequence[str], sizes: Sequence[int], limit: int, group: AnyGroup) -> None:
    for rank, tag in enumerate(tags):
        if tag != tags[0]:
            raise SampleError(
                f'rank {rank} calls {tag!r} while rank 0 calls {tags[0]!r} '
                '(a + stands for allow_pickle=True, a * for same_structure=False, a # for '
                'stacked=True); expected the same call with the same options on all ranks, in '
                'the same order.'
            )
    total, limited_by = sum(sizes), 'max_bytes'
    if limit == _NO_LIMIT and total > _UNCHECKED_BYTES:
        limit, limited_by = _free_memory(group), 'the memory that is free for it'
    if total > limit:
        largest = sizes.index(max(sizes))
        raise SampleError(
            f'{tags[0]}: the samples of all ranks are {total:,} bytes together, more than '
            f'{limited_by}, {limit:,} bytes; rank {largest} has the most, '
            f'{sizes[largest]:,}. Gather fewer or smaller samples, share them out with '
            f'balance_samples(), or raise max_bytes.'
        )


def _free_memory(group: AnyGroup) -> int:
    """The bytes of host memory that each rank may fill, the smallest over all ranks."""
    sharers = int(os.environ.get('LOCAL_WORLD_SIZE', 0)) or torch_dist.get_world_size(group)
    free = torch.tensor([available_memory().available // sharers])
    return int(min(all_gather(free.to(group_device(group)), group)))


def _pieces(data: Tensor) -> Sequence[Tensor]:
    return data.split(_MESSAGE_BYTES) if data.numel() else ()


def exchange_bytes(
    outgoing: Mapping[int, Tensor], sources: Sequence[int], group: AnyGroup = None
) -> Dict[int, Tensor]:
    """Send a uint8 tensor to each of some ranks, and receive those of the ranks in ``sources``."""
    place = group_device(group)
    sent: Dict[int, Tensor] = {}
    sizes: Dict[int, Tensor] = {}
    received: Dict[int, Tensor] = {}
    for rank, data in outgoing.items():
        sent[rank] = data.to(place)
        sizes[rank] = torch.tensor([data.numel()], device=place)
    for rank in sources:
        received[rank] = torch.zeros(1, dtype=torch.int64, device=place)
    _swap(sizes, received, group)
    for rank, size in received.items():
        received[rank] = torch.empty(int(size), dtype=torch.uint8, device=place)
    _swap(sent, received, group)
    return received


def _swap(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], group: AnyGroup) -> None:
    """Send tensors to some ranks, and overwrite those in ``incoming`` with what others send."""
    operations = [
        torch_dist.P2POp(operation, piece, get_global_rank(group, rank), group)
        for operation, tensors in ((torch_dist.isend, outgoing), (torch_dist.irecv, incoming))
        for rank, data in tensors.items()
        for piece in _pieces(data)
    ]
    for work in torch_dist.batch_isend_irecv(operations) if operations else ():
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
    gathered = list(tensor.new_empty(torch_dist.get_world_size(group), *tensor.shape).unbind())
    torch_dist.all_gather(gathered, tensor, group=group)
    return gathered
