"""Measure the host memory that the workers of data loaders hold, without what they share."""

import multiprocessing
import os
import time
from contextlib import suppress
from typing import Callable, List, Optional, Sequence, Tuple

import psutil
from torch.utils.data._utils import signal_handling

from .patched_symbols import LOADER_WORKERS
from .patching import active_patches, patch_symbol

#: The largest part of the time spent on exact figures: Linux walks over all pages of a process
#: for one, up to 0.2 s for each GB.
TIME_FOR_READING = 0.001


class WorkerMemory:
    """Measures the memory of all loader workers that this process starts.

    A worker holds what it has allocated since it started, which costs microseconds to read, and
    those pages that it inherited by ``fork`` and has written to since. The latter are read of one
    worker after the other, at most for a thousandth of the time, and taken for alike in all.
    """

    def __init__(self) -> None:
        found = active_patches(LOADER_WORKERS)
        if not found:
            noting = _Noting(signal_handling._set_worker_pids)
            found = [patch_symbol(signal_handling, '_set_worker_pids', noting)]
        self._noting: _Noting = found[0].replacement
        self._began, self._spent = time.perf_counter(), 0.0
        self._unshared = 0.0

    def measure(self) -> Tuple[int, int]:
        """Return the bytes that workers hold, and how many workers there are."""
        workers = self._noting.running()
        allocated = sum(worker.allocated() for worker in workers)
        if workers and self._spent <= TIME_FOR_READING * (time.perf_counter() - self._began):
            began = time.perf_counter()
            min(workers, key=lambda worker: worker.read_at).read()
            self._spent += time.perf_counter() - began
        known = [worker.unshared for worker in workers if worker.unshared is not None]
        if known:
            self._unshared = sum(known) / len(known)
        return int(allocated + self._unshared * len(workers)), len(workers)


class _Worker:
    """A worker process.

    Attributes:
        unshared (int, optional): Bytes of inherited pages that it has written to, once read.
        read_at (float): When that was.
    """

    def __init__(self, pid: int, forked: bool) -> None:
        self.process = psutil.Process(pid)
        # One that is started anew inherits nothing, but has its parent's memory until it does.
        self._inherited = _anonymous_bytes(self.process) if forked else 0
        self.unshared: Optional[int] = None
        self.read_at = 0.0

    def allocated(self) -> int:
        """The bytes that it has allocated since it started."""
        with suppress(psutil.Error):  # it has ended
            return max(0, _anonymous_bytes(self.process) - self._inherited)
        return 0

    def read(self) -> None:
        """Read which part of its memory is its own."""
        self.read_at = time.perf_counter()
        with suppress(psutil.Error):
            own = self.process.memory_full_info().uss
            self.unshared = max(0, own - self.allocated())


class _Noting:
    """Stands for a function that PyTorch calls with the ids of the workers it has started."""

    def __init__(self, original: Callable) -> None:
        self._original = original
        self._owner = os.getpid()
        self._workers: List[_Worker] = []

    def __call__(self, loader: int, pids: Sequence[int]) -> None:
        self._original(loader, pids)
        running = self.running()
        forked = {
            child.pid
            for child in multiprocessing.active_children()
            if child._popen.method == 'fork'  # type: ignore[attr-defined]
        }
        for pid in pids:
            with suppress(psutil.Error):
                running.append(_Worker(pid, pid in forked))

    def running(self) -> List[_Worker]:
        """The workers of this process; those of the process it was forked from are not."""
        if self._owner != os.getpid():
            self._owner, self._workers = os.getpid(), []
        self._workers = [each for each in self._workers if each.process.is_running()]
        return self._workers


def _anonymous_bytes(process: psutil.Process) -> int:
    """Bytes in memory that are neither files nor memory shared with other processes."""
    found = process.memory_info()
    return found.rss - getattr(found, 'shared', 0)
