"""Add up tensors of all ranks, piece by piece, in memory that the ranks of a host share."""

import mmap
import os
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any, Callable, ContextManager, Deque, List, Optional, Tuple

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.utils.host import has_ended

from .host_buffers import HALVES, is_finite, scale
from .shared_memory import SharedPart

#: What the ranks of a host share for one group, all together, whatever they add up.
SHARED_BYTES = 64 << 20
#: Pieces that are under way at a time: while one is added up, others are copied.
SLOTS = 4
#: Larger pieces leave the processor's cache before they are read again.
MOST_OF_A_PIECE = 4 << 20
#: Seconds without a sum after which the memory goes back to the system.
_KEEP = 0.2
#: Seconds between two looks of the thread that takes the steps of sums that nothing waits for.
_POLL = 0.005
#: Seconds that a waiting rank sleeps at least and at most, and after which it looks for others.
_NAP, _LONG_NAP, _LOOK = 5e-5, 1e-3, 0.25
#: Words of 8 bytes at the head of a rank's memory. The first three count pieces.
_WRITTEN, _ADDED, _READ, _CLOSED, _WRONG = 0, 8, 16, 24, 32
_HEAD = mmap.PAGESIZE


class SharedSum:
    """The sum or average of a flat tensor of each rank, in its place.

    Attributes:
        finite (bool): Whether an average has no NaN and no infinity, the same on all ranks.
    """

    def __init__(self, flat: Tensor, average: bool, keeps: bool, sums: 'SharedSums') -> None:
        self.flat, self.average, self.keeps = flat, average, keeps
        self._sums = sums
        self.begun = 0  # elements whose piece is under way
        self.finite, self.finished = True, False
        self.started = time.monotonic()
        self.error: Optional[RuntimeError] = None

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Wait until the sum is there."""
        self._sums.finish(self, timeout)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if not self.finished:
            self._sums.advance()
        return self.finished


class _Piece:
    """Elements of a sum that are added up in one slot of each rank."""

    message: 'torch_dist.Work'  # to other hosts, when this rank has added up its share

    def __init__(self, of: SharedSum, start: int, stop: int, slots: List[Tensor]) -> None:
        self.of, self.values, self.slots = of, of.flat[start:stop], slots
        self.is_last = stop == of.flat.numel()
        length = -(-(stop - start) // len(slots))
        length = -(-length // 64) * 64  # shares begin at cache lines
        edges = [min(k * length, stop - start) for k in range(len(slots) + 1)]
        self.spans = [slice(*pair) for pair in zip(edges, edges[1:])]


class SharedSums:
    """All sums of a process group, whose hosts have the same number of ranks each.

    A tensor is cut into pieces, and the memory of each rank into a few slots, which the pieces
    take in turn. Each rank copies its piece into its slot, adds up a share of it, read from the
    slots of the others, and averages that share with the ranks of other hosts that have the same
    local rank. Then everybody copies all shares. Each rank counts in its memory the pieces that it
    has written, added up and read, and waits for the counts of the others: no messages are needed
    inside a host, and whoever is missing is known.

    All ranks start the same sums in the same order. Whoever waits for one takes the steps of all;
    a thread takes those of sums that nothing waits for.

    Args:
        parts (list[SharedPart]): The memory of each rank of this host.
        here (int): The place of this rank among those of its host.
        between (ProcessGroupGloo, optional): The ranks with this local rank, if there are hosts.
        size (int): Processes in the group.
        timeout (timedelta): How long a sum waits for the other ranks.
        start_thread (Callable): Starts a thread; returns whether it could.
    """

    def __init__(
        self,
        parts: List[SharedPart],
        here: int,
        between: Any,
        size: int,
        timeout: timedelta,
        start_thread: Callable[[Callable[[], None]], bool],
    ) -> None:
        self.parts, self._here, self._size = parts, here, size
        self._between = between
        self._timeout, self._start_thread = timeout, start_thread
        self._heads = [part.memory.cast('q') for part in parts]
        self._slot_bytes = slot_bytes(len(parts))
        self._waiting: Deque[SharedSum] = deque()  # whose last piece is not under way
        self._pieces: Deque[_Piece] = deque()  # those that this rank has not read
        self._added = 0  # pieces to which this rank has added; the others are counted in its head
        self._working, self._attended = threading.Lock(), False
        self._error: Optional[RuntimeError] = None
        self._stopped, self._is_held = False, True
        self.count = 0  # of sums that have begun

    def begin(self, flat: Tensor, average: bool, keeps: bool = False) -> SharedSum:
        """Begin to add up a flat tensor of any device; all ranks call it in the same order.

        ``keeps``: pieces of an average that are not finite are left as they are.
        """
        begun = SharedSum(flat, average, keeps, self)
        with self._working:
            if self._error is not None:
                raise self._error
            self.count += 1
            self._waiting.append(begun)
        self.advance()
        with self._working:
            if not self._attended:
                self._attended = self._start_thread(self._attend)
        return begun

    def finish(self, wanted: SharedSum, timeout: Optional[timedelta] = None) -> None:
        """Take steps until a sum has ended; threads may wait for several at a time."""
        began, nap, tries = time.monotonic(), _NAP, 0
        limit = (timeout or self._timeout).total_seconds()
        next_look = began + min(_LOOK, limit)
        while not wanted.finished:
            if self.advance():
                nap, tries = _NAP, 0
                continue
            tries += 1
            if tries < 20:
                os.sched_yield()  # the others may need this processor
                continue
            time.sleep(nap)
            nap = min(1.2 * nap, _LONG_NAP)
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LOOK
                self._look(wanted, now - began, limit)

    def close(self) -> None:
        """Let the others know that this rank takes no more steps, and forget the memory.

        What others still read stays until they forget it, too.
        """
        with self._working:
            if not self._stopped:
                self._stopped = True
                self._publish(_CLOSED, 1)
                self._fail(RuntimeError('the group has ended'))
                self._between, self.parts, self._heads = None, [], []

    def advance(self) -> bool:
        """Take all steps that need not wait, unless another thread does; returns if any was."""
        if not self._working.acquire(blocking=False):
            return False
        try:
            moved = False
            while not self._stopped and self._error is None and self._step():
                moved = True
            return moved
        except BaseException as error:  # an interrupt, too: a step half taken must not look taken
            self._fail(error if isinstance(error, RuntimeError) else RuntimeError(repr(error)))
            if not isinstance(error, Exception):
                raise
            return True
        finally:
            self._working.release()

    def _step(self) -> bool:
        """Take the step that other ranks need first, if one can be taken; returns if it was."""
        head = self._heads[self._here]
        written, read = head[_WRITTEN], head[_READ]
        if self._waiting and self._least(_READ) > written - SLOTS:
            self._write(written)
        elif self._added < written and self._least(_WRITTEN) > self._added:
            self._add(self._added, self._pieces[self._added - read])
        elif head[_ADDED] < self._added and self._is_between(self._pieces[head[_ADDED] - read]):
            pass
        elif read < self._added and self._least(_ADDED) > read:
            self._read(read, self._pieces[0])
            self._pieces.popleft()  # not before: what fails is among them
        else:
            return False
        return True

    def _write(self, number: int) -> None:
        its = self._waiting[0]
        elements = self._slot_bytes // its.flat.element_size()
        stop = min(its.begun + elements, its.flat.numel())
        start = _HEAD + (number % SLOTS) * self._slot_bytes
        count, dtype = stop - its.begun, its.flat.dtype
        with torch.inference_mode(False):
            slots = [
                torch.frombuffer(part.memory, dtype=dtype, count=count, offset=start)
                for part in self.parts
            ]
        piece = _Piece(its, its.begun, stop, slots)
        with _mode_of(its.flat):
            slots[self._here].copy_(piece.values)
        self._pieces.append(piece)
        its.begun, self._is_held = stop, True
        if piece.is_last:
            self._waiting.popleft()
        self._publish(_WRITTEN, number + 1)

    def _add(self, number: int, piece: _Piece) -> None:
        here, average = self._here, piece.of.average
        span = piece.spans[here]
        own = piece.slots[here][span]
        with torch.inference_mode(False), torch.no_grad():
            share = own.to(torch.float32) if own.dtype in HALVES else own
            for local_rank, slot in enumerate(piece.slots):
                if local_rank != here:
                    share.add_(slot[span])
            finite = scale(share, 1 / self._size) if average else True
            if share is not own:
                own.copy_(share)
        self._added += 1
        if self._between is not None and own.numel():  # the same on all hosts
            piece.message = self._between.allreduce([own], torch_dist.AllreduceOptions())
        else:
            self._end_share(number, finite)

    def _is_between(self, piece: _Piece) -> bool:
        """Whether the share is added up over hosts; then the others may read it."""
        number = self._heads[self._here][_ADDED]
        if not piece.message.is_completed():
            return False
        piece.message.wait()
        own = piece.slots[self._here][piece.spans[self._here]]
        self._end_share(number, is_finite(own) if piece.of.average else True)
        return True

    def _end_share(self, number: int, finite: bool) -> None:
        self._publish(_WRONG + number % SLOTS, int(not finite))
        self._publish(_ADDED, number + 1)

    def _read(self, number: int, piece: _Piece) -> None:
        its = piece.of
        finite = not any(head[_WRONG + number % SLOTS] for head in self._heads)
        its.finite = its.finite and finite
        if finite or not its.keeps:
            with _mode_of(its.flat):
                for slot, span in zip(piece.slots, piece.spans):
                    if span.start < span.stop:
                        piece.values[span].copy_(slot[span])
        self._publish(_READ, number + 1)
        its.finished = its.finished or piece.is_last

    def _least(self, word: int) -> int:
        """How many pieces all ranks of this host have written, added up or read."""
        least = min(head[word] for head in self._heads)
        self._fence()
        return least

    def _publish(self, word: int, value: int) -> None:
        self._fence()
        self._heads[self._here][word] = value

    @staticmethod
    def _fence() -> None:
        """Keep the order of what is written and counted, on processors that change it."""
        lock = threading.Lock()
        for _ in range(2):
            lock.acquire()
            lock.release()

    def _fail(self, error: RuntimeError) -> None:
        """End all sums: those that are under way wait for the same ranks."""
        self._error = self._error or error
        for its in [*self._waiting, *(piece.of for piece in self._pieces)]:
            its.error = its.error or error
            its.finished = True
        self._waiting.clear()
        self._pieces.clear()

    def _look(self, wanted: SharedSum, waited: float, limit: float) -> None:
        """Give up if a rank that has something to do is gone, or late.

        Raises:
            RuntimeError: If a limit shorter than that of the group has passed.
        """
        total = self._timeout.total_seconds()
        # Asked before their counts: a rank may take its last steps and end at any moment.
        ended = {part.rank for part in self.parts if has_ended(part.pid)}
        closed = {part.rank for part, head in zip(self.parts, self._heads) if head[_CLOSED]}
        with self._working:
            if wanted.finished:
                return
            late, what = self._late()
            gone = [part for part in late if part.rank in ended]
            left = [part for part in late if part.rank in closed]
            if gone or left:
                told = f'{_named(gone)} ended' if gone else f'{_named(left)} left the group'
                self._fail(RuntimeError(told))
            elif time.monotonic() - wanted.started >= total:
                self._fail(RuntimeError(f'timed out after {total:g} s, {_missing(late, what)}'))
            elif waited >= limit:
                raise RuntimeError(f'timed out after {limit:g} s, {_missing(late, what)}')

    def _late(self) -> Tuple[List[SharedPart], str]:
        """The ranks that this one waits for, and what they have not done."""
        own = self._heads[self._here]
        goals = (
            (_WRITTEN, own[_WRITTEN], 'begin it'),
            (_ADDED, self._added, 'add it up'),
            (_READ, own[_WRITTEN] - SLOTS + 1, 'read the last ones'),
        )
        for word, goal, what in goals:
            pairs = zip(self.parts, self._heads)
            late = [part for part, head in pairs if head is not own and head[word] < goal]
            if late:
                return late, what
        return [], ''

    def _attend(self) -> None:
        """Take steps while there are sums: ranks that wait for one need those of this rank."""
        idle_since = time.monotonic()
        while not self._stopped:
            self.advance()
            with self._working:
                if self._waiting or self._pieces:
                    idle_since = time.monotonic()
                elif (
                    time.monotonic() - idle_since > _KEEP
                    and not self._stopped
                    and self._least(_READ) >= self._heads[self._here][_WRITTEN]
                ):
                    self._give_back()
                    self._attended = False
                    return
            time.sleep(_POLL)

    def _give_back(self) -> None:
        """Give the slots of this rank back to the system; they stay where they are."""
        if self._is_held:
            with suppress(OSError):  # not every system can: then it stays
                self.parts[self._here].give_back(_HEAD)
            self._is_held = False


def slot_bytes(ranks: int) -> int:
    """The bytes of a piece, where a host has this number of ranks."""
    most = (SHARED_BYTES // ranks - _HEAD) // SLOTS
    return min(MOST_OF_A_PIECE, most) // mmap.PAGESIZE * mmap.PAGESIZE


def memory_size(ranks: int) -> int:
    """The bytes that each rank of a host shares, where the host has this number of ranks."""
    return _HEAD + SLOTS * slot_bytes(ranks)


def _mode_of(flat: Tensor) -> ContextManager:
    """PyTorch changes a tensor of its inference mode in that mode alone."""
    return torch.inference_mode() if flat.is_inference() else torch.no_grad()


def _missing(late: List[SharedPart], what: str) -> str:
    return f'{_named(late)} did not {what}' if late else 'ranks of other hosts did not answer'


def _named(parts: List[SharedPart]) -> str:
    return ', '.join(f'rank {part.rank} (process {part.pid})' for part in parts)
