"""Let all ranks meet in the store, and fail together if one of them cannot."""

import json
import logging
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Callable, Iterator, Optional, TypeVar

from torch import distributed as torch_dist

from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import DevPlugError, RankFailedError, first_line
from mmdevplug.utils.torch_compat import get_text, set_text

from .failure import current_watch, enter_phase, peers_must_answer, raise_if_another_failed

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


def wait_for_counter(
    store: 'torch_dist.Store',
    env: LaunchEnv,
    key: str,
    target: int,
    stage: str,
    timeout: timedelta,
) -> None:
    """Wait until a counter in the store reaches a number.

    Ranks that wait here are in a phase that says so, the others are missing.

    Raises:
        RankFailedError: If the number is not reached in time, or another rank failed meanwhile.
    """
    watch, here = current_watch(), f'{stage}: waiting for the others'
    before = '' if watch is None else watch.heartbeat.phase[0]

    def reached() -> bool:
        if store.add(key, 0) >= target:
            return True
        raise_if_another_failed()
        return False

    enter_phase(here)
    try:
        if wait_until(reached, timeout.total_seconds()):
            return
        text = (
            f'missing after {timeout.total_seconds():.0f} s at {stage!r}. A slow start needs a '
            f'longer env_cfg.dist_cfg.timeout'
        )
        if watch is None:
            raise RankFailedError(f'{env.describe()} stops: ranks are {text}.')
        seen = {rank: watch.heartbeat.read(rank) for rank in range(env.world_size)}
        missing = [rank for rank, last in seen.items() if last is None or last.phase != here]
        if None in seen.values():
            text += (
                f'. Check that all {env.world_size} ranks were started, with the same '
                f'MASTER_ADDR={env.master_addr!r}, MASTER_PORT={env.master_port} and WORLD_SIZE='
                f'{env.world_size}, and look at the log of those that were'
            )
        raise watch.report_ranks(missing or list(seen), f'{text}.', alive=True)
    finally:
        enter_phase(before)


@contextmanager
def in_store(env: LaunchEnv, stage: str) -> Iterator[None]:
    """Treat silent ranks as dead inside this context; explain the loss of the store.

    Raises:
        RankFailedError: In place of an error of the store.
    """
    with peers_must_answer():
        try:
            yield
        except DevPlugError:
            raise
        except RuntimeError as lost:
            watch = current_watch()
            if watch is not None:
                raise watch.store_lost(lost) from lost
            raise RankFailedError(
                f'{env.describe()} lost the store of the job while it waited in {stage!r}: '
                f'{first_line(lost)}. Look at the log of rank 0.'
            ) from lost


def meet(
    store: 'torch_dist.Store', env: LaunchEnv, prefix: str, stage: str, timeout: timedelta
) -> int:
    """Wait until all ranks are here; return how often its keys have been used, with this time.

    It costs two round trips and a few short reads of the store.

    Raises:
        RankFailedError: If a rank does not come in time, or failed.
    """
    with in_store(env, stage):
        key = f'{prefix}/arrived'
        # All have arrived at a meeting before any can arrive at the next.
        number = -(-store.add(key, 1) // env.world_size)
        wait_for_counter(store, env, key, number * env.world_size, stage, timeout)
    # A rank that comes too late finds the arrivals of ranks that have given up.
    raise_if_another_failed()
    return number


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
        if getattr(caught, '_mmdevplug_reported', False):
            raise  # the others know, and may not come
        error = caught
    try:
        prefix = next_meeting(store, env, stage)
        if error is not None:
            ticket = store.add(f'{prefix}/failures', 1)
            text = f'{env.describe()}: {type(error).__name__}: {error}'[:4000]
            set_text(store, f'{prefix}/failure/{ticket}', json.dumps(text))
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
    lines = '\n'.join(f'  {report}' for report in reports)
    raise RankFailedError(f'{count} of {env.world_size} ranks failed in {stage!r}:\n{lines}')


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
