"""Agree whether the ranks of a group add up large tensors in memory that they share."""

import json
import warnings
from typing import TYPE_CHECKING, Any, List, Optional

import torch
from torch import distributed as torch_dist

from mmdevplug.utils.host import host_name

from .host_buffers import pins_memory
from .shared_memory import group_by_host, share_memory
from .shared_sum import SharedSums, memory_size

if TYPE_CHECKING:
    from .group_base import GroupBase


def share_sums(group: 'GroupBase', device_type: str) -> Optional[SharedSums]:
    """Return where a group adds up large tensors; None on all ranks if they cannot share memory.

    All ranks of the group call it at the same time.
    """

    def gather(value: object) -> List[object]:
        # To what a caller's inference mode makes, gloo of PyTorch 2.1 cannot write in its threads.
        with torch.inference_mode(False):
            return _gather_json(value, group.gloo, group.size())

    rank = group.rank()
    # Page-locked memory cannot be shared, and copies to it make up for that.
    suits = not pins_memory(device_type)
    names, types, suiting = zip(*gather([host_name(), device_type, suits]))
    if len(set(types)) > 1 and rank == 0:
        listed = ', '.join(f'rank {each} {kind!r}' for each, kind in enumerate(types))
        warnings.warn(
            f'ranks of one group have tensors on different kinds of devices: {listed}. The '
            f'collectives take them, but all ranks wait for the slowest.',
            stacklevel=2,
        )
    hosts = group_by_host(names)
    counts = {len(ranks) for ranks in hosts}
    here = next(ranks for ranks in hosts if rank in ranks)
    if not all(suiting) or len(counts) > 1 or len(here) == 1:
        return None
    parts = share_memory(memory_size(len(here)), here, gather, rank)
    if parts is None:
        return None
    place, between = here.index(rank), None
    if len(hosts) > 1:
        peers = [ranks[place] for ranks in hosts]
        store = torch_dist.PrefixStore(f'staged/between/{peers[0]}', group.store)
        limits = len(peers), group.limit
        between = torch_dist.ProcessGroupGloo(store, peers.index(rank), *limits)
    return SharedSums(parts, place, between, group.size(), group.limit, group.start_thread)


def _gather_json(value: object, gloo: Any, size: int) -> List[Any]:
    """Give every rank the values of all ranks, of what JSON can write, in the order of ranks."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device='cpu') for _ in range(size)]
    own = torch.tensor([text.numel()], dtype=torch.int64, device='cpu')
    gloo.allgather([lengths], [own]).wait()
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device='cpu')
    padded[: text.numel()] = text
    found = [torch.zeros(longest, dtype=torch.uint8, device='cpu') for _ in range(size)]
    gloo.allgather([found], [padded]).wait()
    pairs = zip(found, lengths)
    return [json.loads(each[: int(length)].numpy().tobytes()) for each, length in pairs]
