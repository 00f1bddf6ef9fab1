"""Say once a minute what this process waits for, where no :class:`.FailureWatch` runs.

Another package may have started the process group: then there are no heartbeats. A thread
publishes in the store of that group that this rank waits, once it has waited for a second: what
takes less costs nothing.
"""

import atexit
import json
import logging
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

from torch import distributed as torch_dist

from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.torch_compat import (
    get_global_rank,
    get_text,
    lets_threads_share_stores,
    set_text,
)

from .abort import say
from .heartbeat import list_numbers

#: Nobody waits longer than a minute without a line.
REPORT_SECONDS = 55.0
_TICK = 1.0


class _Waiting(NamedTuple):
    began: float
    make: Callable[[], Any]  # what describes it; called once it has taken a second


class _LongWaits:
    """One thread that looks at what the main thread waits for."""

    def __init__(self) -> None:
        self.current: Optional[_Waiting] = None
        self._thread: Optional[threading.Thread] = None
        self._ending = threading.Event()

    def begin(self, make: Callable[[], Any]) -> None:
        self.current = _Waiting(time.monotonic(), make)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name='mmdevplug-waits', daemon=True)
            self._thread.start()
            atexit.register(self.end)  # it must not use a store while the interpreter ends

    def end(self) -> None:
        atexit.unregister(self.end)
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_TICK)

    def _look(self) -> None:
        seen: Optional[_Waiting] = None
        told: Any = None
        said = 0.0
        while not self._ending.wait(_TICK):
            now, waiting = time.monotonic(), self.current
            if waiting is not seen:
                if told is not None:
                    told.leave()
                seen, told = waiting, None
            if waiting is None or now - waiting.began < _TICK:
                continue
            if told is None:
                told = waiting.make()
            whom = told.describe()
            if whom is not None and now - max(waiting.began, said) >= REPORT_SECONDS:
                said = now
                say(f'{told.what} has waited {now - waiting.began:.0f} s{whom}')


#: Of functions that are called often.
_LONG_WAITS = _LongWaits()


class _Told(NamedTuple):
    what: str

    def describe(self) -> str:
        return '.'

    def leave(self) -> None:
        pass


@contextmanager
def reported_wait(what: str) -> Iterator[None]:
    """Say once a minute that something in this context waits; ``what`` is who, where, for whom."""
    waits = _LongWaits()
    waits.begin(lambda: _Told(what))
    try:
        yield
    finally:
        waits.end()


@contextmanager
def collective_of(stage: str, group: AnyGroup = None) -> Iterator[None]:
    """Say once a minute which ranks a function waits for that all ranks of a group call."""
    single = not (torch_dist.is_available() and torch_dist.is_initialized())
    if single or _LONG_WAITS.current is not None:
        yield
        return
    _LONG_WAITS.begin(lambda: _Present(stage, group))
    try:
        yield
    finally:
        _LONG_WAITS.current = None


class _Present:
    """Publish that this rank waits, and find out which ranks do not."""

    def __init__(self, stage: str, group: AnyGroup) -> None:
        self.stage, self.group, self.rank = stage, group, torch_dist.get_rank()
        self.what = f'rank {self.rank} of {torch_dist.get_world_size()} in {stage}'
        self._store: Any = None

    def describe(self) -> Optional[str]:
        """Name the ranks that do not wait here; None if a lower rank says so, or there is none."""
        if torch_dist.get_world_size(self.group) == 1:
            return None
        try:
            others = self._read()
        except RuntimeError as error:
            logging.getLogger(__name__).debug('no store to ask: %s', error)
            return '.'
        if others is None:
            return '.'
        here = [rank for rank, stage in others.items() if stage == self.stage]
        if here and min(here) < self.rank:
            return None
        missing = [rank for rank in others if rank not in here]
        if not missing:
            return '; all ranks wait there.'
        elsewhere = [f'rank {rank} waits in {others[rank]}' for rank in missing if others[rank]]
        more = f'; {"; ".join(elsewhere)}' if elsewhere else ''
        return f' for {list_numbers(missing)}, which did not come there{more}.'

    def _read(self) -> Optional[Dict[int, str]]:
        """Where the other ranks of the group wait, '' for nowhere; None if that is unknown."""
        if not lets_threads_share_stores():
            return None
        if self._store is None:
            default = torch_dist.distributed_c10d._get_default_store()
            self._store = torch_dist.PrefixStore('mmdevplug/long_waits', default)
            self._publish(self.stage)
        return {rank: self._stage_of(rank) for rank in self._ranks() if rank != self.rank}

    def _ranks(self) -> List[int]:
        size = torch_dist.get_world_size(self.group)
        return [get_global_rank(self.group, rank) for rank in range(size)]

    def _stage_of(self, rank: int) -> str:
        # `get` would wait for a missing key.
        if not self._store.add(f'there/{rank}', 0):
            return ''
        return json.loads(get_text(self._store, f'stage/{rank}'))

    def _publish(self, stage: str) -> None:
        set_text(self._store, f'stage/{self.rank}', json.dumps(stage))
        self._store.add(f'there/{self.rank}', 1)

    def leave(self) -> None:
        """Publish that this rank does not wait any more."""
        try:
            if self._store is not None:
                self._publish('')
        except RuntimeError as error:
            logging.getLogger(__name__).debug('no store to tell: %s', error)
