"""Large sums of a process group: whether its ranks share memory for them, and where."""

import json
import warnings
from datetime import timedelta
from typing import Any, List, Optional, Sequence

import torch
from torch import distributed as torch_dist

from .host_buffers import pins_memory
from .shared_memory import group_by_host, host_name
from .shared_sum import SharedSum, SharedSums

#: Of fewer bytes, the message takes less time than the barriers in its place.
LEAST_BYTES = 1 << 20
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class LargeSums:
    """Sums of large tensors in memory that the ranks of a host share, where that works.

    Args:
        gloo (ProcessGroupGloo): Of all ranks.
        store (Store): Where the ranks meet.
        rank (int): This process in the group.
        size (int): Processes in the group.
        timeout (timedelta): How long a sum waits for the other ranks.

    Attributes:
        sums (SharedSums, optional): None until the first large sum, and where ranks do not share.
    """

    def __init__(
        self,
        gloo: 'torch_dist.ProcessGroupGloo',
        store: 'torch_dist.Store',
        rank: int,
        size: int,
        timeout: timedelta,
    ) -> None:
        self._gloo: Any = gloo
        self._store, self._rank, self._size = store, rank, size
        self._timeout = timeout
        self.sums: Optional[SharedSums] = None
        self._sought = size == 1

    def begin(self, numel: int, dtype: torch.dtype, device_type: str) -> Optional[SharedSum]:
        """Open a sum in shared memory; None on all ranks where there is none."""
        size = numel * torch.empty(0, dtype=dtype).element_size()
        if dtype not in _DTYPES or size < LEAST_BYTES:
            return None
        sums = self._find(device_type)
        return None if sums is None else sums.begin(numel, dtype)

    def make_room(self, size: int, device_type: str) -> None:
        """Share memory for ``size`` bytes of sums that are open at a time."""
        sums = self._find(device_type) if size >= LEAST_BYTES else None
        if sums is not None:
            sums.make_room(size)

    def close(self) -> None:
        """Let go of gloo, whose threads end with the last who knows it."""
        self._gloo = None
        if self.sums is not None:
            self.sums.close()

    def _find(self, device_type: str) -> Optional[SharedSums]:
        if not self._sought:
            self._sought = True
            self.sums = self._share(device_type)
        return self.sums

    def _share(self, device_type: str) -> Optional[SharedSums]:
        """Agree whether ranks add up in shared memory; a message between all of them."""
        # Page-locked memory cannot be shared, and copies to it make up for that.
        suits = not pins_memory(device_type)
        names, types, suiting = zip(*self._gather([host_name(), device_type, suits]))
        if len(set(types)) > 1 and self._rank == 0:
            listed = ', '.join(f'rank {rank} {each!r}' for rank, each in enumerate(types))
            warnings.warn(
                f'ranks of one group have tensors on different kinds of devices: {listed}. The '
                f'collectives take them, but all ranks wait for the slowest.',
                stacklevel=2,
            )
        hosts = group_by_host(names, self._rank)
        counts = [len(ranks) for ranks in hosts.ranks]
        if all(suiting) and len(set(counts)) == 1 and counts[0] > 1:
            return SharedSums(hosts, self._gather, self._make_group, self._rank, self._size)
        return None

    def _gather(self, value: object) -> List[Any]:
        return _gather_json(value, self._gloo, self._size)

    def _make_group(self, name: str, ranks: Sequence[int]) -> Any:
        store = torch_dist.PrefixStore(f'staged/{name}', self._store)
        place = list(ranks).index(self._rank)
        return torch_dist.ProcessGroupGloo(store, place, len(ranks), self._timeout)


def _gather_json(value: object, gloo: 'torch_dist.ProcessGroupGloo', size: int) -> List[Any]:
    """Give every rank the values of all ranks, of what JSON can write, in the order of ranks."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    gloo.allgather([lengths], [torch.tensor([text.numel()])]).wait()
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: text.numel()] = text
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    gloo.allgather([found], [padded]).wait()
    pairs = zip(found, lengths)
    return [json.loads(each[: int(length)].numpy().tobytes()) for each, length in pairs]
