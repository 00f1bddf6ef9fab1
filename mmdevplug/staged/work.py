"""What a collective is doing: gloo's part on the host, then the copies to the device."""

import threading
from collections import deque
from datetime import timedelta
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.errors import StagedError

from .host_buffers import size_of

#: What gloo takes for its group's own limit.
_NO_LIMIT = timedelta(0)
#: How long a thread waits at a time, so that Python's end need not wait for it.
SLICE = timedelta(milliseconds=50)
#: The largest results, in bytes, kept for callers in C++ after Python has dropped the work.
_KEPT_BYTES = 4096


class DeferredWork:
    """A message that begins when what it sends has been copied to the host.

    Args:
        wait_for_copies (Callable): Waits for that.
        begin (Callable): Returns the work of gloo.
        begin_all (Callable): Begins all that are deferred, in their order.
    """

    def __init__(
        self,
        wait_for_copies: Callable[[], None],
        begin: Callable[[], Any],
        begin_all: Callable[[], None],
    ) -> None:
        self._wait_for_copies, self._begin, self._begin_all = wait_for_copies, begin, begin_all
        self._work: Any = None
        self._error: Optional[RuntimeError] = None

    def begin(self) -> None:
        """Begin it now; :meth:`wait` raises what goes wrong."""
        try:
            self._wait_for_copies()
            self._work = self._begin()
        except RuntimeError as error:
            self._error = error

    def wait(self, *limit: timedelta) -> bool:
        """Wait until gloo has ended."""
        if self._work is None:
            self._begin_all()
        if self._error is not None:
            raise self._error
        return self._work.wait(*limit)

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        begun = self._work is not None and self._work.is_completed()
        return begun or self._error is not None


class OpenWorks:
    """The works of a group that have not ended, and those that callers in C++ may still have.

    C++ has the C++ half of a work, which does nothing when its Python half is gone: PyTorch's
    reducer would wait for ever for a work that Python has dropped (``DDP.join``).
    """

    def __init__(self) -> None:
        self.works: Dict[int, StagedWork] = {}
        self.dropped: Deque[StagedWork] = deque(maxlen=128)
        self.threads: List[threading.Thread] = []
        self.ending = False

    def finish_before(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Finish the works that write what is to be read, or read or write what is written."""
        for work in list(self.works.values()):
            if overlap([*read, *written], work.written) or overlap(written, work.read):
                work.wait()

    def finish_completed(self) -> None:
        """Copy the results of works that nobody has waited for, as far as they have arrived."""
        for work in list(self.works.values()):
            if not work.is_completed():
                break

    def start_thread(self, target: Callable[[], None]) -> bool:
        """Start a thread that :meth:`join` ends; not while Python ends."""
        self.threads = [each for each in self.threads if each.is_alive()]
        # A daemon, so that a rank whose peers are lost ends with its main thread.
        thread = threading.Thread(target=target, name='staged', daemon=True)
        try:
            thread.start()
        except RuntimeError:  # "can't create new thread at interpreter shutdown"
            return False
        self.threads.append(thread)
        return True

    def join(self) -> None:
        """End the threads: one that comes back to an interpreter that has ended aborts it."""
        self.ending = True
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(1.0)


class StagedWork(getattr(torch_dist, 'Work', object)):  # type: ignore[misc]
    """A collective on copies of tensors, whose results the first who waits copies to the device.

    Args:
        works (Sequence[Work]): Gloo's.
        finish (Callable): Copies the results to where they belong; called once.
        results (list): What the future of this work holds.
        explain (Callable): Returns what to say of an error: the collective, and who was lost.
        kept (Any): Host tensors that gloo reads or writes until it has finished.
        opened (OpenWorks): Those of the group.
        tracked (bool): Whether the group finishes it in any case; not what one rank sends another.
    """

    def __init__(
        self,
        works: Sequence[Any],
        finish: Callable[[], None],
        results: List[Any],
        explain: Callable[[BaseException], str],
        kept: object,
        opened: OpenWorks,
        tracked: bool = True,
    ) -> None:
        super().__init__()
        self._works, self._finish, self._results = list(works), finish, results
        self._explain, self._kept = explain, kept
        self._open, self._tracked = opened, tracked
        self.inference = torch.is_inference_mode_enabled()
        self.read: List[Tensor] = []
        self.written: List[Tensor] = []
        self._lock, self._future_lock = threading.Lock(), threading.Lock()
        self._finished = False
        self.finite = True  # of StagedProcessGroup.average(), the same on all ranks
        self._error: Optional[BaseException] = None
        self._due: Optional[torch.futures.Future] = None
        self._future: Optional[torch.futures.Future] = None
        if tracked:
            opened.works[id(self)] = self

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until the results are where they belong.

        Raises:
            StagedError: If another rank has failed or does not come in time, or this rank cannot
                copy the results.
        """
        late = self.end(timeout)
        if late is not None:
            raise StagedError(self._explain(late)) from late
        if self._error is not None:
            raise self._error
        return True

    def end(self, timeout: timedelta) -> Optional[RuntimeError]:
        """Wait, but raise nothing; returns an error if this may be waited for again."""
        with self._lock:
            if not self._finished:
                try:
                    self._wait(timeout)
                except RuntimeError as error:
                    if timeout and not self._all_completed():
                        return error
                    self._error = StagedError(self._explain(error))
                    self._error.__cause__ = error
                self._finished = True
                self._kept = self._finish = None  # type: ignore[assignment]
                self.read, self.written = [], []
                if self._tracked:
                    self._works = []  # these hold tensors, and gloo's connections
                self._open.works.pop(id(self), None)
        self._complete_future()
        return None

    def _wait(self, timeout: timedelta) -> None:
        for work in self._works:
            try:
                work.wait(timeout) if timeout else work.wait()
            except RuntimeError:
                if not (timeout and work.is_completed()):
                    raise
                work.wait()  # raises its own error, if it has not just ended
        # Off elsewhere: of a sparse tensor new parts are kept, which backward may need.
        with torch.inference_mode(self.inference), torch.no_grad():
            self._finish()
        self.finite = getattr(self._kept, 'finite', True)

    def _all_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if not self._finished and self._all_completed():
            self.end(_NO_LIMIT)
        return self._finished

    def is_success(self) -> bool:
        """Whether the results have arrived."""
        return self.is_completed() and self._error is None

    def exception(self) -> Optional[BaseException]:
        """Why they have not arrived, and will not."""
        return self._error

    def result(self) -> List[Any]:
        """The tensors that the collective has written, in the lists that gloo returns."""
        self.wait()
        nested = len(self._results) == 1 and isinstance(self._results[0], (list, tuple))
        return list(self._results[0]) if nested else self._results

    def source_rank(self) -> int:
        """The rank that sent what was received."""
        return self._works[0]._source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of the results, for callers that do not wait here, such as PyTorch's DDP."""
        with self._future_lock:
            is_new = self._future is None
            if is_new:
                self._due = torch.futures.Future()
                # Callers in C++ see what a callback raises, but not what set_exception() was told.
                self._future = self._due.then(lambda _: self.result())
        # A thread for each: a callback of one may wait for the future of the next.
        if is_new and (self._finished or not self._open.start_thread(self._wait_quietly)):
            self._wait_quietly()
        return self._future

    def _wait_quietly(self) -> None:
        """Complete the future, or leave it when the group ends."""
        while not self._open.ending:
            # Gloo closes its connections when a receiver's limit ends.
            if self.end(SLICE if self._tracked else _NO_LIMIT) is None:
                return

    def _complete_future(self) -> None:
        with self._future_lock:
            due, self._due = self._due, None
        if due is not None:
            due.set_result(None)

    def __del__(self) -> None:
        """Live on for C++, which calls the methods of this half and does not keep it."""
        if self._tracked and self._finished:
            if sum(map(size_of, tensors_in(self._results))) > _KEPT_BYTES:
                self._results, self._future = [], None
            self._open.dropped.append(self)


def tensors_in(parts: Sequence[Any]) -> List[Tensor]:
    """All tensors of a list, and of the lists in it, in order."""
    return [tensor for part in parts for tensor in ([part] if isinstance(part, Tensor) else part)]


def overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors of two lists may have memory in common."""
    places = [_memory(each) for each in others] if some else []
    return any(
        place == other and first < end and begin < last
        for place, first, last in map(_memory, some if places else ())
        for other, begin, end in places
    )


def _memory(tensor: Tensor) -> Tuple[int, int, int]:
    """The storage of a tensor, and where in it the tensor begins and ends."""
    try:
        has_untyped = hasattr(tensor, 'untyped_storage')  # since PyTorch 2.0
        storage = (tensor.untyped_storage() if has_untyped else tensor.storage())._cdata
        extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride())) + 1
        first = tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError, AttributeError):  # of a sparse or lazy tensor
        return id(tensor), 0, 1
    return storage, first, first + (extent * tensor.element_size() if tensor.numel() else 0)
