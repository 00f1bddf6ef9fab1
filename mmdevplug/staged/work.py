"""What a collective is doing: gloo's part on the host, then the copies to the device."""

import threading
from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence

import torch
from torch import distributed as torch_dist

from mmdevplug.errors import StagedError, first_line

#: What gloo takes for its group's own limit.
_NO_LIMIT = timedelta(0)


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


class StagedWork(getattr(torch_dist, 'Work', object)):  # type: ignore[misc]
    """A collective on copies of tensors, whose results the first who waits copies to the device.

    Args:
        works (Sequence[Work]): Gloo's.
        finish (Callable): Copies the results to where they belong; called once.
        results (list): What the future of this work holds.
        told (str): The collective, for errors.
        kept (Any): Host tensors that gloo reads or writes until it has finished.
    """

    def __init__(
        self,
        works: Sequence[Any],
        finish: Callable[[], None],
        results: List[Any],
        told: str,
        kept: object,
    ) -> None:
        super().__init__()
        self._works, self._finish, self._results = list(works), finish, results
        self._told, self._kept = told, kept
        self._lock = threading.Lock()
        self._finished = False
        self.finite = True  # of StagedProcessGroup.average(), the same on all ranks
        self._error: Optional[BaseException] = None
        self._future: Optional[torch.futures.Future] = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until the results are where they belong.

        Raises:
            StagedError: If another rank has failed or does not come in time, or this rank cannot
                copy the results.
        """
        with self._lock:
            if not self._finished:
                self._finished = True
                try:
                    for work in self._works:
                        work.wait(timeout) if timeout else work.wait()
                    with torch.no_grad():
                        self._finish()
                    self.finite = getattr(self._kept, 'finite', True)
                except RuntimeError as error:
                    self._error = StagedError(f'{self._told} failed: {first_line(error)}')
                    self._error.__cause__ = error
                self._kept = self._finish = None  # type: ignore[assignment]
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if not self._finished and all(work.is_completed() for work in self._works):
            try:
                self.wait()
            except StagedError:
                return True  # as of gloo's works, whose wait() raises
        return self._finished

    def is_success(self) -> bool:
        """Whether the results have arrived."""
        return self.is_completed() and self._error is None

    def exception(self) -> Optional[BaseException]:
        """Why they have not arrived, and will not."""
        return self._error

    def result(self) -> List[Any]:
        """The tensors that the collective has written."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """The rank that sent what was received."""
        return self._works[0]._source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of the results, for callers that do not wait here, such as PyTorch's DDP."""
        with self._lock:
            if self._future is None:
                due: torch.futures.Future = torch.futures.Future()
                # Callers in C++ see what a callback raises, but not what set_exception() was told.
                self._future = due.then(lambda _: self.result())
                # A thread for each: a callback of one may wait for the future of the next. A
                # daemon, so that a rank whose peers are lost ends with its main thread.
                threading.Thread(
                    target=due.set_result, args=(None,), name='staged', daemon=True
                ).start()
            return self._future
