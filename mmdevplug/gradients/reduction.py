"""Average buckets of gradients over ranks, on the host.

``average`` is a generator: it starts a message, yields while the message travels, and ends when
the average is in place. So the caller can fetch, average and send several buckets at a time. All
ranks take the same steps in the same order.
"""

import inspect
from typing import Any, Dict, Generator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators import DEFAULT_TIMEOUT, device_context
from mmdevplug.distributed.byte_exchange import global_rank
from mmdevplug.distributed.traffic import all_reduce_bytes
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.torch_compat import view_as_dtype

from .buckets import Bucket
from .compression import Compression
from .nonfinite import is_marked_nonfinite, mark_nonfinite, scale_and_check
from .shared_memory import Hosts, find_hosts, share_slots

#: Yields None; returns whether a value is NaN or infinite on some rank.
Steps = Generator[None, None, bool]


class Reduction:
    """Average over gloo, with all ranks in one ring.

    Attributes:
        sent (float): Bytes that this rank has sent so far.
        shared (float): Bytes that it has exchanged in shared memory so far.
    """

    def __init__(self, group: Any, compression: Optional[Compression]) -> None:
        self.group = group
        self.compression = compression
        self.world_size = torch_dist.get_world_size(group)
        self.sent = self.shared = 0.0

    def begin(self) -> None:
        """Wait until the memory may be written to."""

    def average(self, bucket: Bucket, check: bool) -> Steps:
        """Average a bucket over all ranks, in place; ``check`` looks for NaN and infinity."""
        self._scale(bucket.flat, check)
        yield from self.all_reduce(bucket)
        return check and is_marked_nonfinite(bucket.flat)

    def results(self, bucket: Bucket) -> List[Tensor]:
        """Return the averages of a bucket in the gradients' shapes, valid until :meth:`end`."""
        return bucket.views

    def end(self) -> None:
        """End the iteration: this rank has read all averages."""

    def all_reduce(self, bucket: Bucket) -> Generator[None, None, None]:
        """Add up a bucket over all ranks, in place."""
        if self.compression is not None and bucket.flat.dtype == torch.float32:
            self.sent += yield from self.compression.all_reduce(bucket, self.group)
            return
        flat = bucket.flat
        work = torch_dist.all_reduce(flat, group=self.group, async_op=True)
        self.sent += all_reduce_bytes(flat.numel() * flat.element_size(), self.world_size)
        # Two more buckets may start before this one has to complete.
        yield
        yield
        work.wait()

    def _scale(self, flat: Tensor, check: bool) -> None:
        if not check:
            flat.mul_(1 / self.world_size)
        elif scale_and_check(flat, 1 / self.world_size):
            mark_nonfinite(flat)


class TwoLevelReduction(Reduction):
    """Average in memory that the ranks of a host share, then between hosts.

    Each rank of a host adds up its share of the bucket, read from the memory of the others, and
    averages that share with the ranks of other hosts that have the same local rank. This is a
    reduce-scatter and an all-gather without copies, around an all-reduce of
    ``1 / local_world_size`` of the bytes. Compression is used between hosts.

    ``hosts`` have the same number of ranks each; ``slots`` holds for each dtype the memory of each
    local rank. The groups are those of ``before``, on which :meth:`begin` was called, if given.
    """

    def __init__(
        self,
        group: Any,
        compression: Optional[Compression],
        hosts: Hosts,
        slots: Dict[torch.dtype, List[Tensor]],
        before: Optional[Reduction] = None,
    ) -> None:
        super().__init__(group, compression)
        self._local_rank = hosts.local_rank
        self._slots = slots
        self._between: Optional[Reduction] = None
        if isinstance(before, TwoLevelReduction):
            # PyTorch cannot make a group again whose like was destroyed.
            self._written, self._added = before._written, before._added
            self._between = before._between
        else:
            self._make_groups(hosts)
        self._all_read: Any = None

    def _make_groups(self, hosts: Hosts) -> None:
        # One group for each kind of message, so that their order between buckets does not matter.
        members = [[global_rank(self.group, rank) for rank in ranks] for ranks in hosts.ranks]
        self._written = _new_group(members, hosts.here)
        self._added = _new_group(members, hosts.here)
        if len(members) > 1:
            same_local_rank = _new_group(list(zip(*members)), hosts.local_rank)
            self._between = Reduction(same_local_rank, self.compression)

    def begin(self) -> None:
        """Wait until the other ranks of this host have read the averages of the last iteration."""
        if self._all_read is not None:
            self._all_read.wait()

    def end(self) -> None:
        self._all_read = self._start_barrier(self._added)

    def average(self, bucket: Bucket, check: bool) -> Steps:
        written = self._start_barrier(self._written)
        yield
        written.wait()
        flat, own = bucket.flat, self._local_rank
        peers = self._peer_memory(flat)
        spans = _split(flat.numel(), len(peers))
        share = flat[spans[own]]
        for number, peer in enumerate(peers):
            if number != own:
                share.add_(peer[spans[own]])
        self._scale(share, check)
        if self._between is not None and share.numel():  # the same on all hosts
            before = self._between.sent
            yield from self._between.all_reduce(Bucket(share, [share], bucket.number))
            self.sent += self._between.sent - before
        self.shared += all_reduce_bytes(flat.numel() * flat.element_size(), len(peers))
        not_finite = torch.tensor([float(check and is_marked_nonfinite(share))])
        added = self._start_barrier(self._added, not_finite)
        yield
        added.wait()
        return bool(not_finite.item())

    def results(self, bucket: Bucket) -> List[Tensor]:
        """See :meth:`Reduction.results`; averages are in the memory of the rank that summed."""
        peers = self._peer_memory(bucket.flat)
        spans = _split(bucket.flat.numel(), len(peers))
        found, start = [], 0
        for view in bucket.views:
            end = start + view.numel() * (2 if view.is_complex() else 1)
            owners = [i for i, s in enumerate(spans) if s.start < end and start < s.stop]
            if len(owners) == 1 and not view.is_complex():
                found.append(peers[owners[0]][start:end].view(view.shape))
            else:
                # Copied into this rank's memory, which the other ranks have read already.
                for i in set(owners) - {self._local_rank}:
                    part = slice(max(start, spans[i].start), min(end, spans[i].stop))
                    bucket.flat[part] = peers[i][part]
                found.append(view)
            start = end
        return found

    def copy_results(self, flat: Tensor, target: Tensor) -> None:
        """Copy the averages of a bucket, which is the part ``flat`` of this rank's memory."""
        peers = self._peer_memory(flat)
        for peer, span in zip(peers, _split(flat.numel(), len(peers))):
            target[span].copy_(peer[span])

    @staticmethod
    def _start_barrier(group: Any, value: Optional[Tensor] = None) -> Any:
        """Start a barrier that also adds up a value."""
        value = torch.zeros(1) if value is None else value
        return torch_dist.all_reduce(value, group=group, async_op=True)

    def _peer_memory(self, flat: Tensor) -> List[Tensor]:
        """Return the part of each local rank's memory that corresponds to ``flat``."""
        slots = self._slots[flat.dtype]
        start = flat.storage_offset() - slots[self._local_rank].storage_offset()
        return [slot[start : start + flat.numel()] for slot in slots]


def make_reduction(
    sizes: Dict[torch.dtype, int],
    group: Any,
    compression: Optional[Compression],
    hierarchy: Union[str, bool],
    pin_memory: bool,
    before: Optional[Reduction] = None,
) -> Tuple[Reduction, Dict[torch.dtype, Tensor]]:
    """Choose how to average buckets, and allocate memory for them; all ranks choose the same.

    ``sizes`` has the number of elements of each dtype. ``hierarchy='auto'`` averages inside hosts
    first where several ranks share a host, each host has the same number, and ``pin_memory`` is
    False, because page-locked memory cannot be shared. ``before`` is an earlier one of the group.
    """
    hosts = None
    if hierarchy and not (pin_memory and hierarchy == 'auto'):
        hosts = _hosts_to_share_memory(group, compression, hierarchy)
    slots = None if hosts is None else _allocate_shared(sizes, hosts, group)
    if hosts is not None and slots is not None:
        memory = {dtype: parts[hosts.local_rank] for dtype, parts in slots.items()}
        return TwoLevelReduction(group, compression, hosts, slots, before), memory
    memory = {
        dtype: torch.empty(size, dtype=dtype, pin_memory=pin_memory)
        for dtype, size in sizes.items()
    }
    return Reduction(group, compression), memory


def _hosts_to_share_memory(
    group: Any, compression: Optional[Compression], hierarchy: Any
) -> Optional[Hosts]:
    """Find out which ranks share a host; None where averaging inside hosts does not work."""
    world_size = torch_dist.get_world_size(group)
    if world_size == 1 or (compression is not None and not compression.works_on_parts):
        return None
    # A group can make groups by itself, or else all ranks of the job have to take part.
    if not _has_local_synchronization() and world_size != torch_dist.get_world_size():
        return None
    hosts = find_hosts(group)
    counts = [len(ranks) for ranks in hosts.ranks]
    if len(set(counts)) == 1 and counts[0] > 1:
        return hosts
    if hierarchy is True and torch_dist.get_rank(group) == 0:
        log_warning(
            f'model_wrapper_cfg.hierarchy=True is without effect: the hosts run '
            f'{", ".join(map(str, counts))} rank(s); expected as many on each, and more than '
            f'one. All ranks average in one ring.'
        )
    return None


def _allocate_shared(
    sizes: Dict[torch.dtype, int], hosts: Hosts, group: Any
) -> Optional[Dict[torch.dtype, List[Tensor]]]:
    """Allocate shared memory, by dtype and local rank; None on all ranks if they cannot share."""
    lengths = [
        _round_up(size * torch.empty(0, dtype=dtype).element_size())
        for dtype, size in sizes.items()
    ]
    slots = share_slots(sum(lengths), hosts, group)
    if slots is None:
        return None
    pieces = zip(*[slot.split(lengths) for slot in slots])
    return {
        dtype: [view_as_dtype(part, dtype)[:size] for part in parts]
        for (dtype, size), parts in zip(sizes.items(), pieces)
    }


def _has_local_synchronization() -> bool:
    """Return whether only the members of a new group have to call ``new_group``."""
    return 'use_local_synchronization' in inspect.signature(torch_dist.new_group).parameters


def _new_group(members: Sequence[Sequence[int]], mine: int) -> Any:
    """Make this rank's group; before PyTorch 2.1 all ranks have to make all groups."""
    context = device_context()
    options = dict(backend='gloo', timeout=context.timeout if context else DEFAULT_TIMEOUT)
    if _has_local_synchronization():
        return torch_dist.new_group(list(members[mine]), use_local_synchronization=True, **options)
    return [torch_dist.new_group(list(ranks), **options) for ranks in members][mine]


def _split(size: int, parts: int) -> List[slice]:
    """Split ``size`` elements into parts that begin at cache lines."""
    length = _round_up(-(-size // parts))
    return [slice(min(i * length, size), min((i + 1) * length, size)) for i in range(parts)]


def _round_up(size: int) -> int:
    return -(-size // 64) * 64
