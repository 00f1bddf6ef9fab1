"""Let all ranks meet in the store, and fail together if one of them cannot."""

import json
import logging
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Callable, Iterable, Iterator, List, Optional, Tuple, TypeVar

from torch import distributed as torch_dist

from mmdevplug.accelerators.backend import network_hint
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import DevPlugError, RankFailedError
from mmdevplug.utils.torch_compat import get_text, set_text

from . import abort, failure
from .answer_port import GONE
from .long_waits import REPORT_SECONDS

#: After how many seconds a message names the ranks that the others wait for, after twice as many
#: the next, and then once a minute.
PROGRESS_SECONDS = 5.0
#: How long a rank that is about to end keeps the store alive for the others to read it.
LEAVE_SECONDS = 10.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.5

Result = TypeVar('Result')


def next_meeting(store: 'torch_dist.Store', env: LaunchEnv, stage: str) -> str:
    """Return the prefix of the keys of a stage's next meeting, the same on all ranks."""
    # The store outlives a process group: a second meeting must not find the first one's keys.
    with in_store(env, stage):
        number = store.add(f'mmdevplug/{stage}/meetings/{env.rank}', 1)
    return f'mmdevplug/{stage}/{number}'


def wait_until(reached: Callable[[], bool], timeout: float) -> bool:
    """Call a function in growing intervals until it returns True; False after ``timeout`` seconds.

    A blocking wait in the store would hold its connection. Before PyTorch 2.1, the late answer to
    a wait that timed out is also read as the answer to the next request.
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
    """One rank's wait for a counter in the store, with messages that name the missing ranks.

    ``prefix`` begins the names of its keys; ``stage`` names the wait in messages; ``ranks`` may be
    missing. One that stays in the phase ``past[0]`` has passed this point and will not come;
    ``past[1]`` says why.
    """

    def __init__(
        self,
        store: 'torch_dist.Store',
        env: LaunchEnv,
        prefix: str,
        stage: str,
        ranks: Iterable[int],
        past: Optional[Tuple[str, str]] = None,
    ) -> None:
        self._store, self._env, self._past = store, env, past
        self._prefix, self._stage, self._ranks = prefix, stage, ranks
        #: How often this rank has used the keys, this time included; the same on all ranks.
        self.number = store.add(f'{prefix}/here/{env.rank}', 1)

    def until(self, key: str, target: int, timeout: timedelta) -> None:
        """Wait until a counter reaches a number.

        Raises:
            RankFailedError: If it does not in time, or another rank failed meanwhile.
        """
        began, due = time.monotonic(), PROGRESS_SECONDS

        def reached() -> bool:
            nonlocal due
            if self._store.add(key, 0) >= target:
                return True
            failure.raise_if_another_failed()
            failure.note_report()
            waited = time.monotonic() - began
            if waited >= due:
                due = waited + min(due, REPORT_SECONDS)
                self._report_progress(waited)
            return False

        if not wait_until(reached, timeout.total_seconds()):
            raise self._timed_out(timeout)

    def _here(self, rank: int) -> bool:
        return self._store.add(f'{self._prefix}/here/{rank}', 0) >= self.number

    def _is_reporter(self) -> bool:
        """Whether this is the lowest rank that waits; one message is enough."""
        return not any(self._here(rank) for rank in range(self._env.rank))

    def _missing(self) -> List[int]:
        return [rank for rank in self._ranks if not self._here(rank)]

    def _report_progress(self, waited: float) -> None:
        if not self._is_reporter():
            return
        missing = self._missing()
        if missing:  # else the last one has just come
            gone = failure.find_dead(missing)
            if gone:
                raise failure.missing_ranks_error(
                    self._env, gone, f'needed at {self._stage!r}, but {GONE}'
                )
            if self._past is not None:
                phase, why = self._past
                passed = failure.ranks_staying(missing, phase)
                if passed:
                    raise failure.missing_ranks_error(self._env, passed, why, alive=True)
            abort.say(
                f'{self._env.describe()} has waited {waited:.0f} s in {self._stage!r} for '
                f'{failure.describe_ranks(missing)}.'
            )

    def _timed_out(self, timeout: timedelta) -> RankFailedError:
        if not self._is_reporter():
            # That rank reports which ranks are missing, and all ranks repeat its report.
            failure.raise_if_another_failed(wait=LEAVE_SECONDS)
        missing = self._missing()
        there = self._env.world_size - len(missing)
        return failure.missing_ranks_error(
            self._env,
            missing,
            f'missing after {timeout.total_seconds():.0f} s at {self._stage!r}, where {there} of '
            f'{self._env.world_size} ranks arrived. {self._advice(missing)}; a slow start needs a '
            f'longer env_cfg.dist_cfg.timeout.'
            f'{network_hint(self._env)}',
            alive=True,
        )

    def _advice(self, missing: List[int]) -> str:
        env = self._env
        if not failure.lacks_beats(missing) or not env.master_addr:
            return 'Look at the log of the missing ranks'
        return (
            f'Check that all {env.world_size} ranks were started, with the same MASTER_ADDR='
            f'{env.master_addr!r}, MASTER_PORT={env.master_port} and WORLD_SIZE='
            f'{env.world_size}, and look at the log of those that were'
        )


@contextmanager
def in_store(env: LaunchEnv, stage: str) -> Iterator[None]:
    """Treat silent ranks as dead inside this context; explain the loss of the store.

    Raises:
        RankFailedError: In place of an error of the store.
    """
    with failure.peers_must_answer():
        try:
            yield
        except DevPlugError:
            raise
        except RuntimeError as lost:
            raise failure.store_lost(env, lost, stage) from lost


def meet(
    store: 'torch_dist.Store',
    env: LaunchEnv,
    prefix: str,
    stage: str,
    timeout: timedelta,
    past: Optional[Tuple[str, str]] = None,
) -> int:
    """Wait until all ranks are here; return how often its keys have been used, with this time.

    It costs two round trips and a few short reads of the store.

    Raises:
        RankFailedError: If a rank does not come in time, or failed.
    """
    with in_store(env, stage):
        wait = Wait(store, env, prefix, stage, range(env.world_size), past)
        store.add(f'{prefix}/arrived', 1)
        wait.until(f'{prefix}/arrived', wait.number * env.world_size, timeout)
    # A rank that comes too late finds the arrivals of ranks that have given up.
    failure.raise_if_another_failed()
    return wait.number


def run_on_every_rank(
    store: 'torch_dist.Store',
    env: LaunchEnv,
    stage: str,
    function: Callable[[], Result],
    timeout: timedelta,
) -> Result:
    """Call a function on every rank, and raise on every rank if it raises on any.

    Without a store this rank is alone.

    Raises:
        Exception: This rank's own error.
        RankFailedError: On the other ranks; names the ranks that failed.
    """
    if store is None or env.world_size == 1:
        return function()
    result: Any = None
    error: Optional[Exception] = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    try:
        prefix = next_meeting(store, env, stage)
        if error is not None:
            ticket = store.add(f'{prefix}/failures', 1)
            report = {'who': env.describe(), 'message': str(error)}
            set_text(store, f'{prefix}/failure/{ticket}', json.dumps(report))
        meet(store, env, prefix, stage, timeout)
    except RuntimeError as lost:
        if error is not None:
            raise error from lost
        raise
    count = store.add(f'{prefix}/failures', 0)
    if not count:
        return result
    reports = [json.loads(get_text(store, f'{prefix}/failure/{i + 1}')) for i in range(count)]
    leave_together(store, env, prefix)
    if error is not None:
        raise error
    lines = '\n'.join(f'  {report["who"]}: {report["message"]}' for report in reports)
    raise RankFailedError(f'{count} of {env.world_size} ranks failed at {stage!r}:\n{lines}')


def leave_together(
    store: 'torch_dist.Store', env: LaunchEnv, prefix: str, number: int = 1
) -> None:
    """Let rank 0, which may hold the store, wait a few seconds until the others have read it."""
    try:
        store.add(f'{prefix}/left', 1)
        if env.rank == 0:
            all_left = number * env.world_size
            wait_until(lambda: store.add(f'{prefix}/left', 0) >= all_left, LEAVE_SECONDS)
    except RuntimeError as gone:
        # The holder of the store may have left already; this rank has read what it needs.
        logging.getLogger(__name__).debug('the store ended early: %s', gone)
