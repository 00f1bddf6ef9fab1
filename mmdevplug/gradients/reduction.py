"""Average buckets of gradients over ranks, on the host.

``average`` is a generator: it starts a message, yields while the message travels, and ends when
the average is in place. So the caller can fetch, average and send several buckets at a time. All
ranks take the same steps in the same order.
"""

import inspect
import logging
from typing import Any, Dict, Generator, List, Optional, Sequence

import torch
from mmengine.logging import print_log
from torch import Tensor, distributed as torch_dist

from mmdevplug.distributed.byte_exchange import global_rank
from mmdevplug.distributed.process_group import DEFAULT_TIMEOUT, device_context
from mmdevplug.distributed.traffic import all_reduce_bytes
from mmdevplug.utils.torch_compat import view_as_dtype

from .buckets import Bucket
from .compression import Compression
from .nonfinite import is_marked_nonfinite, mark_nonfinite, scale_and_check
from .shared_memory import Hosts, find_hosts, share_slots

#: Yields None; returns whether a value is NaN or infinite on some rank.
Steps = Generator[None, None, bool]


class Reduction:
    """Average over gloo, with all ranks in one ring.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.
        compression (Compression, optional): What is sent instead of the values themselves.
            Defaults to None.
        pin_memory (bool): Whether to allocate page-locked memory. Defaults to False.

    Attributes:
        sent (float): Bytes that this rank has sent so far.
        shared (float): Bytes that it has exchanged in shared memory so far.
    """

    def __init__(
        self,
        group: Any = None,
        compression: Optional[Compression] = None,
        pin_memory: bool = False,
    ) -> None:
        self.group = group
        self._pin_memory = pin_memory
        self.compression = compression
        self.world_size = torch_dist.get_world_size(group)
        self.sent = self.shared = 0.0

    def allocate(self, sizes: Dict[torch.dtype, int]) -> Dict[torch.dtype, Tensor]:
        """Allocate host memory for buckets.

        Args:
            sizes (Dict[torch.dtype, int]): For each dtype the number of elements.
        """
        return {
            dtype: torch.empty(size, dtype=dtype, pin_memory=self._pin_memory)
            for dtype, size in sizes.items()
        }

    def begin(self) -> None:
        """Wait until the memory may be written to."""

    def average(self, bucket: Bucket, check: bool = True) -> Steps:
        """Average a bucket over all ranks, in place.

        Args:
            bucket (Bucket): In memory that :meth:`allocate` returned.
            check (bool): Whether to look for values that are not finite. Defaults to True.

        Returns:
            Generator: The caller runs it to its end. It returns whether any rank had a value that
            is not finite.
        """
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
    ``1 / local_world_size`` of the bytes.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.
        compression (Compression, optional): Used between hosts. Defaults to None.
        hosts (Hosts): Which ranks share a host; the same number on each.
    """

    def __init__(self, group: Any, compression: Optional[Compression], hosts: Hosts) -> None:
        super().__init__(group, compression)
        self.hosts = hosts
        self._slots: Dict[torch.dtype, List[Tensor]] = {}
        local_groups, counterparts = _make_groups(hosts, group)
        # One group for each kind of message, so that their order between buckets does not matter.
        self._written, self._added = local_groups
        self._between = Reduction(counterparts, compression) if len(hosts.ranks) > 1 else None
        self._all_read: Any = None

    def allocate(self, sizes: Dict[torch.dtype, int]) -> Optional[Dict[torch.dtype, Tensor]]:
        """Allocate shared memory for buckets.

        Args:
            sizes (Dict[torch.dtype, int]): For each dtype the number of elements.

        Returns:
            Dict[torch.dtype, Tensor] or None: This rank's memory; None on all ranks if they cannot
            share memory.
        """
        lengths = {dtype: _aligned(size * _element_size(dtype)) for dtype, size in sizes.items()}
        slots = share_slots(sum(lengths.values()), self.hosts, self.group)
        if slots is None:
            return None
        pieces = [slot.split(list(lengths.values())) for slot in slots]
        for index, (dtype, size) in enumerate(sizes.items()):
            self._slots[dtype] = [view_as_dtype(parts[index], dtype)[:size] for parts in pieces]
        return {dtype: slots[self.hosts.local_rank] for dtype, slots in self._slots.items()}

    def begin(self) -> None:
        """Wait until the other ranks of this host have read the averages of the last iteration."""
        if self._all_read is not None:
            self._all_read.wait()

    def end(self) -> None:
        """See :meth:`Reduction.end`."""
        self._all_read = self._start_barrier(self._added)

    def average(self, bucket: Bucket, check: bool = True) -> Steps:
        """See :meth:`Reduction.average`."""
        written = self._start_barrier(self._written)
        yield
        written.wait()
        flat, own = bucket.flat, self.hosts.local_rank
        peers = self._peer_memory(flat)
        spans = _split(flat.numel(), len(peers))
        others = [number for number in range(len(peers)) if number != own]
        share = flat[spans[own]]
        for number in others:
            share.add_(peers[number][spans[own]])
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
        """See :meth:`Reduction.results`: in the memory of the rank that added them up."""
        peers = self._peer_memory(bucket.flat)
        spans = _split(bucket.flat.numel(), len(peers))
        found, start = [], 0
        for view in bucket.views:
            end = start + view.numel() * (2 if view.is_complex() else 1)
            owners = [i for i, s in enumerate(spans) if s.start < end and start < s.stop]
            if len(owners) == 1:
                found.append(_view_in(peers[owners[0]], view, bucket.flat, start, end))
            else:
                # Copied into this rank's memory, which the other ranks have read already.
                for i in set(owners) - {self.hosts.local_rank}:
                    part = slice(max(start, spans[i].start), min(end, spans[i].stop))
                    bucket.flat[part] = peers[i][part]
                found.append(view)
            start = end
        return found

    @staticmethod
    def _start_barrier(group: Any, value: Optional[Tensor] = None) -> Any:
        """Start a barrier that also adds up a value."""
        value = torch.zeros(1) if value is None else value
        return torch_dist.all_reduce(value, group=group, async_op=True)

    def _peer_memory(self, flat: Tensor) -> List[Tensor]:
        """Return the part of each local rank's memory that corresponds to ``flat``."""
        slots = self._slots[flat.dtype]
        start = flat.storage_offset() - slots[self.hosts.local_rank].storage_offset()
        return [slot[start : start + flat.numel()] for slot in slots]


def make_reduction(
    group: Any = None,
    compression: Optional[Compression] = None,
    hierarchy: Any = 'auto',
    pin_memory: bool = False,
) -> Reduction:
    """Choose how to average buckets; all ranks choose the same.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.
        compression (Compression, optional): Defaults to None.
        hierarchy (str or bool): Whether to average inside hosts first. ``'auto'``: where several
            ranks share a host, each host has the same number, and the device does not copy faster
            from and to page-locked memory, which cannot be shared. Defaults to ``'auto'``.
        pin_memory (bool): Whether the device copies faster from and to page-locked memory.
            Defaults to False.
    """
    flat = Reduction(group, compression, pin_memory)
    if hierarchy is False or flat.world_size == 1 or (pin_memory and hierarchy == 'auto'):
        return flat
    if compression is not None and not compression.works_on_parts:
        return flat
    if not _can_make_groups(flat.world_size):
        return flat
    hosts = find_hosts(group)
    if not hosts.even or hosts.local_world_size == 1:
        if hierarchy is True and torch_dist.get_rank(group) == 0:
            print_log(
                f'model_wrapper_cfg.hierarchy=True is without effect: the hosts run '
                f'{", ".join(str(len(ranks)) for ranks in hosts.ranks)} rank(s); expected as many '
                f'on each, and more than one. All ranks average in one ring.',
                'current',
                logging.WARNING,
            )
        return flat
    return TwoLevelReduction(group, compression, hosts)


def _make_groups(hosts: Hosts, group: Any) -> Any:
    """Make two groups of this rank's host, and one of the same local rank on all hosts."""
    everywhere = [global_rank(group, rank) for rank in range(torch_dist.get_world_size(group))]
    local_groups, counterparts = [], None
    for _ in range(2):
        members = [[everywhere[rank] for rank in ranks] for ranks in hosts.ranks]
        local_groups.append(_new_group(members, hosts.here))
    if len(hosts.ranks) > 1:
        members = [
            [everywhere[ranks[number]] for ranks in hosts.ranks]
            for number in range(hosts.local_world_size)
        ]
        counterparts = _new_group(members, hosts.local_rank)
    return local_groups, counterparts


def _can_make_groups(world_size: int) -> bool:
    """Tell whether the ranks of a group can make groups without the other ranks."""
    return _has_local_synchronization() or world_size == torch_dist.get_world_size()


def _has_local_synchronization() -> bool:
    """Tell whether only the members of a new group have to call ``new_group``."""
    return 'use_local_synchronization' in inspect.signature(torch_dist.new_group).parameters


def _new_group(members: Sequence[Sequence[int]], mine: int) -> Any:
    """Make this rank's group; before PyTorch 2.1 all ranks have to make all groups."""
    context = device_context()
    options = dict(backend='gloo', timeout=context.timeout if context else DEFAULT_TIMEOUT)
    if _has_local_synchronization():
        return torch_dist.new_group(list(members[mine]), use_local_synchronization=True, **options)
    return [torch_dist.new_group(list(ranks), **options) for ranks in members][mine]


def _view_in(other: Tensor, view: Tensor, flat: Tensor, start: int, end: int) -> Tensor:
    """Return the view of ``other`` that corresponds to the view ``view`` of ``flat``."""
    if other.data_ptr() == flat.data_ptr():
        return view
    if view.is_complex():
        return torch.view_as_complex(other[start:end].view(*view.shape, 2))
    return other[start:end].view(view.shape)


def _split(size: int, parts: int) -> List[slice]:
    """Split ``size`` elements into parts that begin at cache lines."""
    length = -(-size // parts)
    length = -(-length // 64) * 64
    return [slice(min(i * length, size), min((i + 1) * length, size)) for i in range(parts)]


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _element_size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
