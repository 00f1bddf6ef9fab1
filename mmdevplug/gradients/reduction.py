"""How a bucket of gradients on the host is averaged over ranks.

Every way is a generator over a flat tensor: it starts something, yields while that runs, and in
the end has the average in place. So the caller fetches, averages and sends several buckets at a
time, and since all ranks take the same steps in the same order, no rank waits for another's.
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
from mmdevplug.utils.torch_compat import memory_as

from .compression import Bucket, Compression
from .nonfinite import is_poisoned, poison, scale_and_check
from .shared_memory import Hosts, find_hosts, share_slots

#: Yields nothing; returns whether a value is NaN or infinite on some rank.
Steps = Generator[None, None, bool]


class Reduction:
    """Averages over gloo, all ranks in one ring.

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
        """Host memory to average in.

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
            bucket (Bucket): In memory that :meth:`allocate` gave.
            check (bool): Whether to look for values that are not finite. Defaults to True.

        Returns:
            Generator: To be run to its end; its value tells whether any rank had a value that is
            not finite.
        """
        self._scale(bucket.flat, check)
        yield from self.add_up(bucket)
        return check and is_poisoned(bucket.flat)

    def results(self, bucket: Bucket) -> List[Tensor]:
        """Where a bucket's averages are until :meth:`end`, for each gradient in its shape."""
        return bucket.views

    def end(self) -> None:
        """Tell that the averages of an iteration have been read."""

    def add_up(self, bucket: Bucket) -> Generator[None, None, None]:
        """Add up a bucket over all ranks, in place."""
        if self.compression is not None and bucket.flat.dtype == torch.float32:
            self.sent += yield from self.compression.add_up(bucket, self.group)
            return
        flat = bucket.flat
        work = torch_dist.all_reduce(flat, group=self.group, async_op=True)
        self.sent += all_reduce_bytes(flat.numel() * flat.element_size(), self.world_size)
        # Two more buckets may set off before this one has to be there.
        yield
        yield
        work.wait()

    def _scale(self, flat: Tensor, check: bool) -> None:
        if not check:
            flat.mul_(1 / self.world_size)
        elif scale_and_check(flat, 1 / self.world_size):
            poison(flat)


class TwoLevelReduction(Reduction):
    """Averages in the memory that the ranks of a host share, then between hosts.

    Each rank of a host adds up its share of the bucket, straight from the memory of the others,
    and averages that share with its counterparts on other hosts: a reduce-scatter and an
    all-gather without copies, around an all-reduce of ``1 / local_world_size`` of the bytes.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.
        compression (Compression, optional): Used between hosts. Defaults to None.
        hosts (Hosts): Which ranks share a host; as many on each.
    """

    def __init__(self, group: Any, compression: Optional[Compression], hosts: Hosts) -> None:
        super().__init__(group, compression)
        self.hosts = hosts
        self._slots: Dict[torch.dtype, List[Tensor]] = {}
        locals_, counterparts = _groups(hosts, group)
        # One group for each kind of message: their order between buckets need not be kept.
        self._written, self._added = locals_
        self._between = Reduction(counterparts, compression) if len(hosts.ranks) > 1 else None
        self._all_read: Any = None

    def allocate(self, sizes: Dict[torch.dtype, int]) -> Optional[Dict[torch.dtype, Tensor]]:
        """Shared memory to average in.

        Args:
            sizes (Dict[torch.dtype, int]): For each dtype the number of elements.

        Returns:
            Dict[torch.dtype, Tensor] or None: This rank's own; None on all ranks if memory cannot
            be shared.
        """
        lengths = {dtype: _aligned(size * _element_size(dtype)) for dtype, size in sizes.items()}
        slots = share_slots(sum(lengths.values()), self.hosts, self.group)
        if slots is None:
            return None
        pieces = [slot.split(list(lengths.values())) for slot in slots]
        for index, (dtype, size) in enumerate(sizes.items()):
            self._slots[dtype] = [memory_as(parts[index], dtype)[:size] for parts in pieces]
        return {dtype: slots[self.hosts.local_rank] for dtype, slots in self._slots.items()}

    def begin(self) -> None:
        """Wait until the other ranks of this host have read the last iteration's buckets."""
        if self._all_read is not None:
            self._all_read.wait()

    def end(self) -> None:
        """See :meth:`Reduction.end`."""
        self._all_read = self._meet(self._added)

    def average(self, bucket: Bucket, check: bool = True) -> Steps:
        """See :meth:`Reduction.average`."""
        written = self._meet(self._written)
        yield
        written.wait()
        flat, own = bucket.flat, self.hosts.local_rank
        peers = self._same_part(flat)
        spans = _spans(flat.numel(), len(peers))
        others = [number for number in range(len(peers)) if number != own]
        share = flat[spans[own]]
        for number in others:
            share.add_(peers[number][spans[own]])
        self._scale(share, check)
        if self._between is not None and share.numel():  # as many on all hosts
            before = self._between.sent
            yield from self._between.add_up(Bucket(share, [share], bucket.number))
            self.sent += self._between.sent - before
        self.shared += all_reduce_bytes(flat.numel() * flat.element_size(), len(peers))
        not_finite = torch.tensor([float(check and is_poisoned(share))])
        added = self._meet(self._added, not_finite)
        yield
        added.wait()
        return bool(not_finite.item())

    def results(self, bucket: Bucket) -> List[Tensor]:
        """See :meth:`Reduction.results`: in the memory of whoever has added them up."""
        peers = self._same_part(bucket.flat)
        spans = _spans(bucket.flat.numel(), len(peers))
        found, start = [], 0
        for view in bucket.views:
            end = start + view.numel() * (2 if view.is_complex() else 1)
            owners = [i for i, s in enumerate(spans) if s.start < end and start < s.stop]
            if len(owners) == 1:
                found.append(_in_other_memory(view, bucket.flat, peers[owners[0]], start, end))
            else:
                # The parts of others come here, where nobody reads them any more.
                for i in set(owners) - {self.hosts.local_rank}:
                    part = slice(max(start, spans[i].start), min(end, spans[i].stop))
                    bucket.flat[part] = peers[i][part]
                found.append(view)
            start = end
        return found

    @staticmethod
    def _meet(group: Any, told: Optional[Tensor] = None) -> Any:
        """Start a barrier that adds up a value."""
        told = torch.zeros(1) if told is None else told
        return torch_dist.all_reduce(told, group=group, async_op=True)

    def _same_part(self, flat: Tensor) -> List[Tensor]:
        """The part of each local rank's memory that corresponds to ``flat``."""
        slots = self._slots[flat.dtype]
        start = flat.storage_offset() - slots[self.hosts.local_rank].storage_offset()
        return [slot[start : start + flat.numel()] for slot in slots]


def make_reduction(
    group: Any = None,
    compression: Optional[Compression] = None,
    hierarchy: Any = 'auto',
    pin_memory: bool = False,
) -> Reduction:
    """Choose how buckets are averaged; the same on all ranks.

    Args:
        group (ProcessGroup, optional): Defaults to None: all ranks.
        compression (Compression, optional): Defaults to None.
        hierarchy (str or bool): Whether to average inside hosts first. ``'auto'``: where several
            ranks share a host, and each host has as many, and the device does not copy faster
            from and to page-locked memory, which cannot be shared. Defaults to ``'auto'``.
        pin_memory (bool): Whether the device copies faster from and to page-locked memory.
            Defaults to False.
    """
    flat = Reduction(group, compression, pin_memory)
    if hierarchy is False or flat.world_size == 1 or (pin_memory and hierarchy == 'auto'):
        return flat
    if compression is not None and not compression.works_on_parts:
        return flat
    if not _groups_can_be_made(flat.world_size):
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


def _groups(hosts: Hosts, group: Any) -> Any:
    """Two groups of this rank's host, and one of its counterparts on all hosts."""
    everywhere = [global_rank(group, rank) for rank in range(torch_dist.get_world_size(group))]
    locals_, counterparts = [], None
    for _ in range(2):
        members = [[everywhere[rank] for rank in ranks] for ranks in hosts.ranks]
        locals_.append(_new_group(members, hosts.here))
    if len(hosts.ranks) > 1:
        members = [
            [everywhere[ranks[number]] for ranks in hosts.ranks]
            for number in range(hosts.local_world_size)
        ]
        counterparts = _new_group(members, hosts.local_rank)
    return locals_, counterparts


def _groups_can_be_made(world_size: int) -> bool:
    """Whether the ranks of a group can make groups among themselves."""
    return _makes_groups_alone() or world_size == torch_dist.get_world_size()


def _makes_groups_alone() -> bool:
    """Whether ranks that are no members may stay away when a group is made."""
    return 'use_local_synchronization' in inspect.signature(torch_dist.new_group).parameters


def _new_group(members: Sequence[Sequence[int]], mine: int) -> Any:
    """Make this rank's group; in older releases all ranks take part in making all groups."""
    context = device_context()
    options = dict(backend='gloo', timeout=context.timeout if context else DEFAULT_TIMEOUT)
    if _makes_groups_alone():
        return torch_dist.new_group(list(members[mine]), use_local_synchronization=True, **options)
    return [torch_dist.new_group(list(ranks), **options) for ranks in members][mine]


def _in_other_memory(view: Tensor, flat: Tensor, other: Tensor, start: int, end: int) -> Tensor:
    """What ``view`` would be if it were a part of ``other`` and not of ``flat``."""
    if other.data_ptr() == flat.data_ptr():
        return view
    if view.is_complex():
        return torch.view_as_complex(other[start:end].view(*view.shape, 2))
    return other[start:end].view(view.shape)


def _spans(size: int, parts: int) -> List[slice]:
    """Cut ``size`` elements into parts that begin at cache lines."""
    length = -(-size // parts)
    length = -(-length // 64) * 64
    return [slice(min(i * length, size), min((i + 1) * length, size)) for i in range(parts)]


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _element_size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
