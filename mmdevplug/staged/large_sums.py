"""Large sums of a process group: whether its ranks share memory for them, and where."""

import json
import warnings
from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence

import torch
from torch import Tensor, distributed as torch_dist

from .host_buffers import pins_memory, size_of
from .shared_memory import group_by_host, host_name, share_memory
from .shared_sum import SharedSums, memory_size

#: Of fewer bytes, the message takes less time than waiting for the others in shared memory.
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
        start_thread (Callable): Starts a thread; returns whether it could.

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
        start_thread: Callable[[Callable[[], None]], bool],
    ) -> None:
        self._gloo: Any = gloo
        self._start_thread = start_thread
        self._store, self._rank, self._size = store, rank, size
        self._timeout = timeout
        self.sums: Optional[SharedSums] = None
        self._sought = size == 1

    def suiting(self, tensor: Tensor) -> Optional[SharedSums]:
        """Where ranks add up a tensor in shared memory; None on all ranks where they do not."""
        size = size_of(tensor)
        if tensor.dtype not in _DTYPES or size < LEAST_BYTES or not size:
            return None
        if not self._sought:
            self._sought = True
            self.sums = self._share(tensor.device.type)
        return self.sums

    def close(self) -> None:
        """Let go of gloo, whose threads end with the last who knows it."""
        self._gloo = None
        if self.sums is not None:
            self.sums.close()

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
            parts = share_memory(memory_size(counts[0]), hosts, self._gather, self._rank)
            if parts is not None:
                peers = [ranks[hosts.local_rank] for ranks in hosts.ranks]
                between = self._make_group(peers) if len(peers) > 1 else None
                limits = self._size, self._timeout
                return SharedSums(parts, hosts, between, *limits, self._start_thread)
        return None

    def _gather(self, value: object) -> List[Any]:
        return _gather_json(value, self._gloo, self._size)

    def _make_group(self, ranks: Sequence[int]) -> Any:
        store = torch_dist.PrefixStore(f'staged/between/{ranks[0]}', self._store)
        place = list(ranks).index(self._rank)
        return torch_dist.ProcessGroupGloo(store, place, len(ranks), self._timeout)


def _gather_json(value: object, gloo: 'torch_dist.ProcessGroupGloo', size: int) -> List[Any]:
    """Give every rank the values of all ranks, of what JSON can write, in the order of ranks."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    whole, byte = (dict(dtype=each, device='cpu') for each in (torch.int64, torch.uint8))
    lengths = [torch.zeros(1, **whole) for _ in range(size)]
    gloo.allgather([lengths], [torch.tensor([text.numel()], **whole)]).wait()
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, **byte)
    padded[: text.numel()] = text
    found = [torch.zeros(longest, **byte) for _ in range(size)]
    gloo.allgather([found], [padded]).wait()
    pairs = zip(found, lengths)
    return [json.loads(each[: int(length)].numpy().tobytes()) for each, length in pairs]
