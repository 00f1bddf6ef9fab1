"""Let all ranks meet in the store, and fail together if one of them cannot."""

import json
import logging
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Callable, Iterable, Iterator, List, Optional

from mmdevplug.environments.launch import LaunchEnv
from mmdevplug.errors import DevPlugError, RankFailedError

from . import abort, failure, failure_watch
from .network_hints import network_hint

#: How often it is said for whom the others wait.
PROGRESS_SECONDS = 5.0
#: How long a rank that is about to end waits for the others to read what it has left in the store.
LEAVE_SECONDS = 10.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.5

#: How often this process met the others, by stage; equal on all ranks.
_meetings: Counter = Counter()
_rounds: Counter = Counter()


def next_round(stage: str) -> int:
    """How often this process has come to a stage, this time included; equal on all ranks.

    For meetings that go on counting in the same keys: no rank comes again before all have come.
    """
    _rounds[stage] += 1
    return _rounds[stage]


def next_meeting(stage: str) -> str:
    """The prefix of the keys of a stage's next meeting, the same on all ranks."""
    # A store outlives a process group: a second meeting must not find the first one's marks.
    _meetings[stage] += 1
    return f'mmdevplug/{stage}/{_meetings[stage]}'


def wait_until(reached: Callable[[], bool], timeout: float) -> bool:
    """Look again and again, and less often the longer it takes.

    A blocking wait in the store would hold its connection, and one that timed out leaves older
    releases of PyTorch with a connection that cannot be used any more.

    Args:
        reached (callable): Whether the wait is over.
        timeout (float): In seconds.

    Returns:
        bool: Whether it was reached in time.
    """
    began = time.monotonic()
    while not reached():
        waited = time.monotonic() - began
        if waited >= timeout:
            return False
        pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, waited / 3))
        time.sleep(min(pause, timeout - waited))
    return True


class Wait:
    """One rank's wait for a counter in the store, with messages about whom it waits for.

    Args:
        store (torch.distributed.Store): A store that all ranks share.
        env (LaunchEnv): How this process was started.
        prefix (str): Where this wait keeps its keys.
        stage (str): What is waited for, for messages.
        ranks (Iterable[int]): Whom it may have to wait for.
        number (int): How often the keys have been used, this time included. Defaults to 1.
    """

    def __init__(
        self,
        store: Any,
        env: LaunchEnv,
        prefix: str,
        stage: str,
        ranks: Iterable[int],
        number: int = 1,
    ) -> None:
        self._store, self._env = store, env
        self._prefix, self._stage, self._ranks = prefix, stage, ranks
        self._number = number

    def mark(self) -> None:
        """Note that this rank is here."""
        self._store.add(f'{self._prefix}/here/{self._env.rank}', 1)

    def until(self, key: str, wanted: int, timeout: timedelta) -> None:
        """Wait until a counter reaches a number.

        Raises:
            RankFailedError: If it does not in time, or another rank failed meanwhile.
        """
        began = told = time.monotonic()

        def reached() -> bool:
            nonlocal told
            if self._store.add(key, 0) >= wanted:
                return True
            failure.raise_if_another_failed()
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                self._tell(told - began)
            return False

        if not wait_until(reached, timeout.total_seconds()):
            raise self._timed_out(timeout)

    def _here(self, rank: int) -> bool:
        return self._store.add(f'{self._prefix}/here/{rank}', 0) >= self._number

    def _speaks(self) -> bool:
        """Whether this is the lowest rank that waits; one voice is enough."""
        return not any(self._here(rank) for rank in range(self._env.rank))

    def _missing(self) -> List[int]:
        return [rank for rank in self._ranks if not self._here(rank)]

    def _tell(self, waited: float) -> None:
        if not self._speaks():
            return
        missing = self._missing()
        if missing:  # else the last one came this very moment
            gone = failure.find_dead(missing)
            if gone:
                raise failure.missing_ranks_error(
                    self._env, gone, f'needed at {self._stage!r}, but {failure_watch.GONE}'
                )
            abort.say(
                f'{self._env.describe()} has waited {waited:.0f} s in {self._stage!r} for '
                f'{failure.describe_ranks(missing)}.'
            )

    def _timed_out(self, timeout: timedelta) -> RankFailedError:
        if not self._speaks():
            # That rank reports whom it misses, and with the report all say the same.
            failure.raise_if_another_failed(wait=LEAVE_SECONDS)
        missing = self._missing()
        there = self._env.world_size - len(missing)
        return failure.missing_ranks_error(
            self._env,
            missing,
            f'missing after {timeout.total_seconds():.0f} s at {self._stage!r}, where {there} of '
            f'{self._env.world_size} ranks arrived. Look at the log of the missing ranks; a slow '
            f'start needs a longer env_cfg.dist_cfg.timeout.{network_hint(self._env)}',
            alive=True,
        )


@contextmanager
def in_store(env: LaunchEnv, stage: str) -> Iterator[None]:
    """Give silent ranks up inside this, and say who held the store if it is lost.

    Args:
        env (LaunchEnv): How this process was started.
        stage (str): What is being done, for messages.

    Raises:
        RankFailedError: In place of an error of the store.
    """
    with failure.armed():
        try:
            yield
        except DevPlugError:
            raise
        except RuntimeError as lost:
            raise failure.store_lost(env, lost, stage) from lost


def meet(
    store: Any, env: LaunchEnv, prefix: str, stage: str, timeout: timedelta, number: int = 1
) -> None:
    """Wait until all ranks are here; costs two round trips and a few short looks.

    Args:
        store (torch.distributed.Store): A store that all ranks share.
        env (LaunchEnv): How this process was started.
        prefix (str): Where this meeting keeps its keys; see :func:`next_meeting`.
        stage (str): What is being done, for messages.
        timeout (timedelta): How long to wait for the slowest rank.
        number (int): How often the keys have been used, this time included. Defaults to 1.

    Raises:
        RankFailedError: If a rank does not come in time, or failed.
    """
    wait = Wait(store, env, prefix, stage, range(env.world_size), number)
    with in_store(env, stage):
        wait.mark()
        store.add(f'{prefix}/arrived', 1)
        wait.until(f'{prefix}/arrived', number * env.world_size, timeout)
    # Whoever came too late finds all arrivals, of ranks that have given up.
    failure.raise_if_another_failed()


def raise_on_any_rank(
    store: Any, env: LaunchEnv, stage: str, error: Optional[Exception], timeout: timedelta
) -> None:
    """Meet with the other ranks and raise everywhere if any of them met an error.

    Args:
        store (torch.distributed.Store): A store that all ranks share.
        env (LaunchEnv): How this process was started.
        stage (str): What was being done.
        error (Exception, optional): This rank's error, None if all went well.
        timeout (timedelta): How long to wait for the slowest rank.

    Raises:
        DevPlugError: On every rank, if any rank had an error: its own on a rank that failed, and
            one that names the failing ranks on the others.
    """
    if env.world_size == 1:
        if error is not None:
            raise error
        return
    prefix = next_meeting(stage)
    if error is not None:
        ticket = store.add(f'{prefix}/failures', 1)
        report = {'who': env.describe(), 'message': str(error)}
        store.set(f'{prefix}/failure/{ticket}', json.dumps(report))
    try:
        meet(store, env, prefix, stage, timeout)
    except RuntimeError as lost:
        if error is not None:
            raise error from lost
        raise
    count = store.add(f'{prefix}/failures', 0)
    if not count:
        return
    reports = [json.loads(store.get(f'{prefix}/failure/{i + 1}')) for i in range(count)]
    leave_together(store, env, prefix)
    if error is not None:
        raise error
    told = '\n'.join(f'  {report["who"]}: {report["message"]}' for report in reports)
    raise RankFailedError(f'{count} of {env.world_size} ranks failed at {stage!r}:\n{told}')


def leave_together(store: Any, env: LaunchEnv, prefix: str, number: int = 1) -> None:
    """Keep the rank that may hold the store alive until the others have read it, within bounds."""
    try:
        store.add(f'{prefix}/left', 1)
        if env.rank == 0:
            all_left = number * env.world_size
            wait_until(lambda: store.add(f'{prefix}/left', 0) >= all_left, LEAVE_SECONDS)
    except RuntimeError as gone:
        # The holder of the store may have left already; what was there is in hand.
        logging.getLogger(__name__).debug('the store ended early: %s', gone)
