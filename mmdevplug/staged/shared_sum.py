"""Add up tensors of all ranks in memory that the ranks of a host share."""

import mmap
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Generator, List, Optional, Sequence

import torch
from torch import Tensor, distributed as torch_dist
from torch.distributed import ReduceOp

from .host_buffers import HALVES, is_finite, scale
from .shared_memory import Gather, RanksByHost, share_memory

#: What is shared at first, and how many of the largest tensors have room at a time.
LEAST_CAPACITY = 64 << 20
ROOM_FOR = 4
#: Seconds after which a waiting thread looks whether the one that did its work has left.
_TAKE_OVER = 0.002

#: Seconds after which sums go on that nothing here waits for.
_POLL = 0.01

#: Makes a group of gloo of these ranks, which all call it with the same name.
MakeGroup = Callable[[str, Sequence[int]], Any]
#: Yields the message that it waits for.
Steps = Generator[Any, None, None]


class SharedSum:
    """The sum or average of a tensor of each rank: write to ``own``, start, wait, read, close.

    Attributes:
        own (Tensor): This rank's part of the memory, flat.
        finite (bool): Whether an average has no NaN and no infinity, the same on all ranks.
    """

    def __init__(
        self, number: int, start: int, parts: List[Tensor], local_rank: int, sums: 'SharedSums'
    ) -> None:
        self.number = number
        self.own = parts[local_rank]
        self.finite = True
        self.finished = threading.Event()
        self.closed = False
        self.place = start, start + self.own.numel() * self.own.element_size()
        self.parts, self._sums = parts, sums
        self.spans = _split(self.own.numel(), len(parts))
        self.taken = 0
        #: Reads and closes it, where its memory is needed before anybody waited for it.
        self.reclaim: Optional[Callable[[], Any]] = None
        self._error: Optional[Exception] = None

    def start(self, average: bool) -> None:
        """Begin to add up what the ranks have written."""
        self._steps = self._sums.steps(self, average)
        self._message = next(self._steps)
        self._sums.add(self)

    def wait(self, timeout: object = None) -> bool:
        """Wait until the sum may be read; the limit is that of the group."""
        self._sums.finish(self)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if not self.finished.is_set():
            self._sums.advance()
        return self.finished.is_set()

    def copy_to(self, target: Tensor) -> None:
        """Copy the sum to a tensor of any device."""
        if target.is_contiguous():
            flat = target.view(-1)
            for part, span in zip(self.parts, self.spans):
                flat[span].copy_(part[span])
        else:
            whole = torch.cat([part[span] for part, span in zip(self.parts, self.spans)])
            target.copy_(whole.view(target.shape))

    def read(self, start: int, stop: int) -> Tensor:
        """The sum from one element to another, valid until :meth:`close`."""
        spans = list(zip(self.parts, self.spans))
        owners = [each for each in spans if each[1].start < stop and start < each[1].stop]
        if len(owners) == 1:
            return owners[0][0][start:stop]
        # Copied into this rank's memory, which the other ranks have read already.
        for part, span in owners:
            if part is not self.own:
                piece = slice(max(start, span.start), min(stop, span.stop))
                self.own[piece] = part[piece]
        return self.own[start:stop]

    def close(self) -> None:
        """Leave the memory to later sums: this rank has read what it needs."""
        self.closed, self.reclaim = True, None
        self._sums.forget_closed()

    def advance(self, blocks: bool) -> None:
        """Take the next step, if it need not wait or may."""
        if not blocks and not self._message.is_completed():
            return
        try:
            self._message.wait()
            self._message = next(self._steps)
            self.taken += 1
        except StopIteration:
            self.finished.set()
        except RuntimeError as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End it without a sum."""
        self._error = self._error or error
        self.finished.set()

    @property
    def error(self) -> Optional[Exception]:
        """Why there is no sum."""
        return self._error


class SharedSums:
    """All sums of a process group, whose hosts have the same number of ranks each.

    Each rank copies its tensor into its part of the memory, adds up a share of it, read from the
    parts of the others, and averages that share with the ranks of other hosts that have the same
    local rank. Then everybody copies all shares. This is a reduce-scatter and an all-gather
    without messages but barriers, around an all-reduce of ``1 / local_world_size`` of the bytes.

    All ranks start the same sums in the same order. Whoever waits for one takes its steps, and
    those of the others that need not wait; a thread takes those of sums that nothing waits for.
    """

    def __init__(
        self, hosts: RanksByHost, gather: Gather, make_group: MakeGroup, rank: int, size: int
    ) -> None:
        self._hosts, self._gather, self._rank, self._size = hosts, gather, rank, size
        # One for each kind of message, so that their order between sums does not matter.
        here = hosts.ranks[hosts.here]
        self._written: Any = make_group(f'written{hosts.here}', here)
        self._added: Any = make_group(f'added{hosts.here}', here)
        peers = [ranks[hosts.local_rank] for ranks in hosts.ranks]
        between = f'between{hosts.local_rank}'
        self._between: Any = make_group(between, peers) if len(peers) > 1 else None
        self._memory: List[mmap.mmap] = []
        self._capacity = self._stop = 0
        self._open: Deque[SharedSum] = deque()  # as far as this rank knows, some rank reads them
        self._begun = self._read = self._read_by_all = 0
        self._active: Deque[SharedSum] = deque()
        self._working = threading.Lock()
        self._keeper: Optional[threading.Thread] = None
        self._keeping = threading.Lock()

    def begin(self, numel: int, dtype: torch.dtype) -> Optional[SharedSum]:
        """Find memory for a tensor; all ranks call it in the same order.

        Returns None on all ranks if they cannot share as much.
        """
        size = numel * torch.empty(0, dtype=dtype).element_size()
        start = self._allocate(size)
        if start is None:
            return None
        place = dict(dtype=dtype, count=numel, offset=start)
        parts = [torch.frombuffer(memory, **place) for memory in self._memory]
        begun = SharedSum(self._begun, start, parts, self._hosts.local_rank, self)
        self._begun += 1
        self._open.append(begun)
        return begun

    def make_room(self, size: int) -> None:
        """Share memory for ``size`` bytes of tensors that are open at a time."""
        if size > self._capacity:
            self._share(size)

    def close(self) -> None:
        """Let go of gloo, but for sums that have not ended."""
        with self._working:
            if not self._active:
                self._written = self._added = self._between = None

    def add(self, started: SharedSum) -> None:
        """Take note of a sum that has started, and take steps of others that need not wait."""
        self._active.append(started)
        if len(self._active) > 1:
            self.advance()
        with self._keeping:
            if self._keeper is None:
                self._keeper = threading.Thread(
                    target=self._keep_going, name='staged', daemon=True
                )
                self._keeper.start()

    def advance(self) -> None:
        """Take steps that need not wait, unless somebody does."""
        if self._working.acquire(blocking=False):
            try:
                if self._active:
                    self._take_steps(blocks=False)
            finally:
                self._working.release()

    def _keep_going(self) -> None:
        """Take steps while there are sums: ranks that wait for one need those of this rank."""
        while True:
            time.sleep(_POLL)
            self.advance()
            with self._keeping:
                if not self._active:
                    self._keeper = None
                    return

    def steps(self, its: SharedSum, average: bool) -> Steps:
        """The steps of a sum."""
        # Beside the barrier, the ranks learn which sums all of them have read.
        read = torch.tensor([self._read])
        yield _all_reduce(self._written, read, ReduceOp.MIN)
        self._read_by_all = max(self._read_by_all, int(read))
        local_rank = self._hosts.local_rank
        own = its.own[its.spans[local_rank]]
        share = own.float() if own.dtype in HALVES else own
        for number, part in enumerate(its.parts):
            if number != local_rank:
                share.add_(part[its.spans[local_rank]])
        finite = scale(share, 1 / self._size) if average else True
        if share is not own:
            own.copy_(share)
        if self._between is not None and own.numel():  # the same on all hosts
            yield _all_reduce(self._between, own, ReduceOp.SUM)
            finite = is_finite(own) if average else True
        wrong = torch.tensor([float(not finite)])
        yield _all_reduce(self._added, wrong, ReduceOp.SUM)
        its.finite = not wrong.item()

    def finish(self, wanted: SharedSum) -> None:
        """Take steps until a sum has ended; threads may wait for several at a time."""
        while not wanted.finished.is_set():
            if not self._working.acquire(blocking=False):
                wanted.finished.wait(_TAKE_OVER)
                continue
            try:
                while not wanted.finished.is_set():
                    self._take_steps(blocks=True)
            finally:
                self._working.release()

    def _take_steps(self, blocks: bool) -> None:
        """Take a step of the first sum, and of others what need not wait.

        Other ranks may start later sums only after this one has ended. Steps are taken in the
        order of the sums, because that tells messages of a group apart.
        """
        with torch.no_grad():
            active = list(self._active)
            active[0].advance(blocks)
            for before, other in zip(active, active[1:]):
                if before.finished.is_set() or other.taken < before.taken:
                    other.advance(blocks=False)
        while self._active and self._active[0].finished.is_set():
            error = self._active.popleft().error
            if error is not None:  # those after it wait for the same rank
                for other in self._active:
                    other.fail(error)

    def forget_closed(self) -> None:
        """Count the sums that this rank has read."""
        self._read = next(
            (each.number for each in list(self._open) if not each.closed), self._begun
        )

    def _drain(self) -> None:
        for each in list(self._active):
            each.wait()
        for each in list(self._open):
            if each.reclaim is not None:
                each.reclaim()

    def _allocate(self, size: int) -> Optional[int]:
        """Find room for a tensor: the same on all ranks."""
        if size > self._capacity and not self._share(
            max(LEAST_CAPACITY, ROOM_FOR * _round_up(size, mmap.PAGESIZE))
        ):
            return None
        start = self._stop if self._stop + size <= self._capacity else 0
        while self._open and self._open[0].number < self._read_by_all:
            self._open.popleft()
        in_use = [
            each.number
            for each in self._open
            if each.place[0] < start + size and start < each.place[1]
        ]
        if in_use and self._read_by_all <= max(in_use):
            # What the message of the last sum tells is the same on all ranks, and no less than
            # what any of them knew before.
            self._drain()
            if self._read_by_all <= max(in_use):
                self._await_readers()
        self._stop = _round_up(start + size, 64)
        return start

    def _await_readers(self) -> None:
        """Wait until all ranks of this host have read all sums, as this one has.

        Raises:
            ValueError: If a sum is open here, whose memory would be used again.
        """
        if self._read < self._begun:
            raise ValueError(
                f'{self._begun - self._read} sums are open, more than {self._capacity} bytes; '
                f'close the first ones, or call make_room() before'
            )
        _all_reduce(self._added, torch.zeros(1), ReduceOp.SUM).wait()
        self._read_by_all = self._begun
        self._open.clear()

    def _share(self, capacity: int) -> bool:
        self._drain()
        self._await_readers()
        self._memory = []  # before more is asked for
        memory = share_memory(capacity, self._hosts, self._gather, self._rank)
        self._memory, self._stop = memory or [], 0
        self._capacity = 0 if memory is None else capacity
        return memory is not None


def _all_reduce(group: 'torch_dist.ProcessGroup', tensor: Tensor, op: ReduceOp) -> Any:
    options = torch_dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([tensor], options)


def _split(size: int, parts: int) -> List[slice]:
    """Split ``size`` elements into parts that begin at cache lines."""
    length = _round_up(-(-size // parts), 64)
    return [slice(min(i * length, size), min((i + 1) * length, size)) for i in range(parts)]


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
