"""Large sums of a process group: whether its ranks share memory for them, and where."""

import json
import os
import warnings
from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence

import torch
from torch import Tensor, distributed as torch_dist

from .host_buffers import pins_memory, size_of
from .shared_memory import RanksByHost, group_by_host, host_name, share_memory
from .shared_sum import SharedSums, memory_size

#: Of fewer bytes a sum is a message in any case.
LEAST_BYTES = 16 << 10
#: What it is multiplied by where each rank has a core. Where it has not, threads of gloo wait for
#: each other: on 2 cores, 64 KB take 4 ranks 0.3 of gloo's time in shared memory, and 2 ranks 1.8.
#: Nothing is measured at run time: it would change the order of addends, and so the last bits.
_APART = 64
#: Of what ranks tell each other, filled up with spaces.
_JSON_BYTES = 4096
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class LargeSums:
    """Sums of large tensors in memory that the ranks of a host share, where that works.

    Args:
        gloo (ProcessGroupGloo): Of all ranks.
        store (Store): Where the ranks meet.
        rank (int): This process in the group.
        size (int): Processes in the group.
        timeout (timedelta): How long a sum waits for the other ranks.
        start_thread (Callable): Starts a thread; returns whether it could.

    Attributes:
        sums (SharedSums, optional): None until the first large sum, and where ranks do not share.
        least_bytes (float, optional): Of a large sum. The ranks agree on it when they first sum.
    """

    def __init__(
        self,
        gloo: 'torch_dist.ProcessGroupGloo',
        store: 'torch_dist.Store',
        rank: int,
        size: int,
        timeout: timedelta,
        start_thread: Callable[[Callable[[], None]], bool],
    ) -> None:
        self._gloo: Any = gloo
        self._start_thread = start_thread
        self._store, self._rank, self._size = store, rank, size
        self._timeout = timeout
        self.least_bytes: Optional[float] = None
        self._hosts: Optional[RanksByHost] = None
        self.sums: Optional[SharedSums] = None
        self._sought = False

    def suiting(self, tensor: Tensor) -> Optional[SharedSums]:
        """Where ranks add up a tensor in shared memory; None on all ranks where they do not."""
        size = size_of(tensor)
        if tensor.dtype not in _DTYPES or size < LEAST_BYTES or not size or self._size == 1:
            return None
        if self._hosts is None:
            self._hosts = self._meet(tensor.device.type)
        if self.least_bytes is not None and size < self.least_bytes:
            return None
        if not self._sought:
            self._sought = True
            self.sums = self._share(self._hosts)
        return self.sums

    def close(self) -> None:
        """Let go of gloo, whose threads end with the last who knows it."""
        self._gloo = None
        if self.sums is not None:
            self.sums.close()

    def _meet(self, device_type: str) -> RanksByHost:
        """Agree which sums are large, and who can share; a message between all ranks."""
        # Page-locked memory cannot be shared, and copies to it make up for that.
        suits = not pins_memory(device_type)
        own = (
            os.sched_getaffinity(0)
            if hasattr(os, 'sched_getaffinity')
            else range(os.cpu_count() or 1)
        )
        told = [host_name(), device_type, suits, len(own)]
        names, types, suiting, cores = zip(*self._gather(told))
        if len(set(types)) > 1 and self._rank == 0:
            listed = ', '.join(f'rank {rank} {each!r}' for rank, each in enumerate(types))
            warnings.warn(
                f'ranks of one group have tensors on different kinds of devices: {listed}. The '
                f'collectives take them, but all ranks wait for the slowest.',
                stacklevel=3,
            )
        hosts = group_by_host(names, self._rank)
        counts = {len(ranks) for ranks in hosts.ranks}
        self._sought = not all(suiting) or len(counts) > 1 or counts == {1}
        if self.least_bytes is None:
            self.least_bytes = LEAST_BYTES * (1 if max(counts) > min(cores) else _APART)
        return hosts

    def _share(self, hosts: RanksByHost) -> Optional[SharedSums]:
        """Share memory, if all ranks can."""
        count = len(hosts.ranks[0])
        parts = share_memory(memory_size(count), hosts, self._gather, self._rank)
        if parts is None:
            return None
        peers = [ranks[hosts.local_rank] for ranks in hosts.ranks]
        between = self._make_group(peers) if len(peers) > 1 else None
        return SharedSums(parts, hosts, between, self._size, self._timeout, self._start_thread)

    def _gather(self, value: object) -> List[Any]:
        return _gather_json(value, self._gloo, self._size)

    def _make_group(self, ranks: Sequence[int]) -> Any:
        store = torch_dist.PrefixStore(f'staged/between/{ranks[0]}', self._store)
        place = list(ranks).index(self._rank)
        return torch_dist.ProcessGroupGloo(store, place, len(ranks), self._timeout)


def _gather_json(value: object, gloo: 'torch_dist.ProcessGroupGloo', size: int) -> List[Any]:
    """Give every rank the values of all ranks, of what JSON can write, in the order of ranks."""
    text = bytearray(json.dumps(value).encode().ljust(_JSON_BYTES))
    found = [torch.zeros(_JSON_BYTES, dtype=torch.uint8, device='cpu') for _ in range(size)]
    gloo.allgather([found], [torch.frombuffer(text, dtype=torch.uint8)]).wait()
    return [json.loads(each.numpy().tobytes()) for each in found]
