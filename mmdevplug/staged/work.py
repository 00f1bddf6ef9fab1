"""What a collective is doing: gloo's part on the host, then the copies to the device."""

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.errors import StagedError

from .host_buffers import HostBuffers

if TYPE_CHECKING:
    from .shared_sum import SharedSum

#: What gloo, or ranks that share memory, have begun.
Work = Union['torch_dist.Work', 'SharedSum']
#: Such a work, or a function that begins it when copies have arrived.
Beginning = Union[Work, Callable[[], Work]]
#: Tensors that a collective writes, or those of each rank in a list, as gloo takes both.
Results = Sequence[Union[Tensor, Sequence[Tensor]]]
#: What gloo takes for its group's own limit.
_NO_LIMIT = timedelta(0)
#: How long a thread waits at a time, so that Python's end need not wait for it.
SLICE = timedelta(milliseconds=50)
#: The largest results, in elements, kept for callers in C++ after Python has dropped the work.
_KEPT_ELEMENTS = 1024


class StagedWork(getattr(torch_dist, 'Work', object)):  # type: ignore[misc]
    """A collective on copies of tensors, whose results the first who waits copies to the device.

    Args:
        group (GroupBase): The group, which knows the works that have not ended.
        name (str): The collective, for messages.
        tensors (Sequence[Tensor]): What it reads and writes.
        results (list): What it writes, as the future of this work holds it.

    Attributes:
        tracked (bool): Whether the group finishes it in any case; not what one rank sends another.
        written (list[Tensor]): What it writes.
        buffers (HostBuffers): Host tensors that gloo reads or writes until it has finished.
        begins (Sequence): Works of gloo, or functions that begin them when copies have arrived.
        finite (bool): Of StagedProcessGroup.average(), the same on all ranks.
        refused (BaseException, optional): What went wrong when it began.
        number (int): Of a tracked one among those of its group.
    """

    begins: Sequence[Beginning] = ()
    _works: Sequence[Work] = ()
    finite, number, _finished = True, 0, False
    refused: Optional[BaseException] = None
    _error: Optional[BaseException] = None
    _due: Optional['torch.futures.Future[None]'] = None
    _future: Optional['torch.futures.Future[Results]'] = None

    def __init__(self, group: Any, name: str, tensors: Sequence[Tensor], results: Results) -> None:
        super().__init__()
        kind = name[:4]
        self._group, self._name, self.tracked = group, name, kind not in ('send', 'recv')
        self.read, self._results = tensors, results
        self.written = [] if kind == 'send' else tensors_in(results)
        self.buffers = HostBuffers()
        self._inference = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin gloo's part; what is read is on the host then."""
        self.buffers.wait_for_copies()
        self._works = [each() if callable(each) else each for each in self.begins]
        self.begins = ()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until the results are where they belong.

        Raises:
            StagedError: If another rank has failed or does not come in time, or this rank cannot
                copy the results.
        """
        late = self.end(timeout)
        if late is not None:
            raise self._explained(late) from late
        if self._error is not None:
            raise self._error
        return True

    def end(self, timeout: timedelta) -> Optional[RuntimeError]:
        """Wait, but raise nothing; returns an error if this may be waited for again."""
        if not self._lock.acquire(timeout=timeout.total_seconds() if timeout else -1):
            return RuntimeError('timed out while another thread waits')
        try:
            if not self._finished:
                try:
                    late = self._wait(timeout) if self._error is None else None
                    if late is not None:
                        return late
                except BaseException as error:  # results half copied must not look copied
                    self._error = self._explained(error)
                    if not isinstance(error, Exception):
                        raise
                self._finished = True
                self.buffers, self.read = None, ()  # type: ignore[assignment]
                if self.tracked:
                    self._works = []  # these hold tensors, and gloo's connections
                self._group.works.pop(id(self), None)
        finally:
            self._lock.release()
        if self._due is not None:
            with self._group.future_lock:
                due, self._due = self._due, None
            if due is not None:
                due.set_result(None)
        return None

    def _wait(self, timeout: timedelta) -> Optional[RuntimeError]:
        """Wait and copy the results; returns what a work that has not ended in time says."""
        if self.begins:
            self._group.begin_deferred()
        if self.refused is not None:
            raise self.refused
        for work in self._works:
            if isinstance(work, StagedWork):  # of several in one call
                late = work.end(timeout)
                if late is not None:
                    return late
            try:
                work.wait(timeout) if timeout else work.wait()
            except RuntimeError as error:
                if not timeout:
                    raise
                if not work.is_completed():  # asked once: it may end at any moment
                    return error
                work.wait()  # raises its own error, if it has not just ended
        buffers = self.buffers
        if buffers.due or buffers.written:
            # Off elsewhere: of a sparse tensor new parts are kept, which backward may need.
            inference = self._inference or any(map(Tensor.is_inference, self.read))
            with torch.inference_mode(inference), torch.no_grad():
                buffers.copy_back()
            self.finite = buffers.finite
        return None

    def _explained(self, error: BaseException) -> StagedError:
        if isinstance(error, StagedError):  # of one of several that were coalesced
            return error
        told = self._group.explain(error, self.number)
        found = StagedError(f'{self._group.describe(self._name, self.read)} failed: {told}')
        found.__cause__ = error
        return found

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        # Asked first: when nothing is to begin, the works are there.
        if self._finished or (self.begins and self.refused is None):
            return self._finished
        for work in self._works:
            if not work.is_completed():
                return False
        self.end(_NO_LIMIT)
        return self._finished

    def is_success(self) -> bool:
        """Whether the results have arrived."""
        return self.is_completed() and self._error is None

    def exception(self) -> Optional[BaseException]:
        """Why they have not arrived, and will not."""
        return self._error

    def result(self) -> Results:
        """The tensors that the collective has written, in the lists that gloo returns."""
        self.wait()
        first = self._results[0] if len(self._results) == 1 else None
        return list(first) if isinstance(first, (list, tuple)) else self._results

    def source_rank(self) -> int:
        """The rank that sent what was received."""
        received: Any = self._works[0]  # gloo's: nothing is sent through shared memory
        return received._source_rank()

    _source_rank = source_rank

    def get_future(self) -> 'torch.futures.Future[Results]':
        """A future of the results, for callers that do not wait here, such as PyTorch's DDP."""
        with self._group.future_lock:
            future = self._future
            is_new = future is None
            if future is None:
                self._due = torch.futures.Future()
                # Callers in C++ see what a callback raises, but not what set_exception() was told.
                future = self._future = self._due.then(lambda _: self.result())
        # A thread for each: a callback of one may wait for the future of the next.
        if is_new and (self._finished or not self._group.start_thread(self._wait_quietly)):
            self._wait_quietly()
        return future

    def _wait_quietly(self) -> None:
        """Complete the future, or leave it when the group ends."""
        while self._finished or not self._group.ending:
            # Gloo closes its connections when a receiver's limit ends.
            if self.end(SLICE if self.tracked else _NO_LIMIT) is None:
                return

    def __del__(self) -> None:
        """Live on for C++, which calls the methods of this half and does not keep it."""
        if self._finished and self.tracked:
            if sum(map(Tensor.numel, self.written)) > _KEPT_ELEMENTS:
                self._results, self.written, self._future = [], [], None
            self._group.dropped.append(self)


def tensors_in(parts: Results) -> List[Tensor]:
    """All tensors of a list, and of the lists in it, in order."""
    found: List[Tensor] = []
    for part in parts:
        found += [part] if isinstance(part, Tensor) else part
    return found


def overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors of two lists may have memory in common."""
    places = list(map(_memory, others)) if some else []
    for place, first, last in map(_memory, some if places else ()):
        for other, begin, end in places:
            if place == other and first < end and begin < last:
                return True
    return False


def _memory(tensor: Tensor) -> Tuple[int, int, int]:
    """The storage of a tensor, and where in it the tensor begins and ends."""
    try:
        has_untyped = hasattr(tensor, 'untyped_storage')  # since PyTorch 2.0
        storage = (tensor.untyped_storage() if has_untyped else tensor.storage())._cdata
        extent = 1
        for n, step in zip(tensor.shape, tensor.stride()):
            extent += (n - 1) * step
        first = int(tensor.storage_offset()) * tensor.element_size()
    except (RuntimeError, NotImplementedError, AttributeError):  # of a sparse or lazy tensor
        return id(tensor), 0, 1
    return storage, first, first + (extent * tensor.element_size() if tensor.numel() else 0)
