"""End all ranks together when one of them fails: the interface of fault tolerance.

One :class:`.failure_watch.FailureWatch` for each process does the work.
"""

import atexit
import re
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Iterator, List, Optional, Tuple

from torch import distributed as torch_dist

from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import DevPlugError, RankFailedError, StagedError, first_line
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.torch_compat import LockedStore, lets_threads_share_stores

from .abort import shorten_tracebacks
from .failure_watch import FailureWatch
from .heartbeat import DESCRIBED, list_ranks
from .long_waits import collective_of

_COMMUNICATION = re.compile(
    r'gloo|connection (closed|reset|refused) by peer|nccl|hccl|eccl|processgroup|tcpstore'
    r'|broken pipe',
    re.IGNORECASE,
)

#: A rank that has been in a phase for so long does not leave it for a meeting before it.
STAYED_SECONDS = 10.0

_watch: Optional[FailureWatch] = None


def watch_for_failures(
    store: 'torch_dist.Store',
    prefix: str,
    env: LaunchEnv,
    heartbeat_timeout: float,
    timeout: timedelta,
) -> None:
    """Publish this rank's heartbeat and look for failures of other ranks, once in a process."""
    global _watch
    if _watch is None:
        # A second connection, which is free while the main thread waits in the first.
        own = torch_dist.TCPStore(
            env.master_addr, env.master_port, timeout=timeout, wait_for_workers=False
        )
        own = torch_dist.PrefixStore(f'{prefix}/watch', own)
        if not lets_threads_share_stores():
            own = LockedStore(own)
        _watch = FailureWatch(store, own, env, heartbeat_timeout)
        atexit.register(_watch.stop)
        shorten_tracebacks()
    _watch.heartbeat_timeout = heartbeat_timeout


def current_watch() -> Optional[FailureWatch]:
    """The watch of this process, None in a single process."""
    return _watch


def enter_phase(text: str) -> None:
    """Set what this rank does now, which the others name if it is late; takes under 1 µs.

    Examples:
        >>> enter_phase('saving a checkpoint')
    """
    if _watch is not None:
        _watch.heartbeat.enter_phase(text)


@contextmanager
def peers_must_answer() -> Iterator[None]:
    """Treat the silence of another rank as its failure inside this context, and only there."""
    # It counts for a watch that starts inside this context, too.
    if not FailureWatch.waiting:
        FailureWatch.waiting_since = time.monotonic()
    FailureWatch.waiting += 1
    try:
        yield
    finally:
        FailureWatch.waiting -= 1


@contextmanager
def fail_together(stage: str, group: AnyGroup = None) -> Iterator[None]:
    """Report an error to the other ranks, and replace a lost connection with its cause.

    Args:
        stage (str): What is being done, for the message.
        group (ProcessGroup, optional): The ranks that do it. Defaults to None: all.

    Raises:
        RankFailedError: In place of an error of communication, if another rank failed or is gone.
    """
    outermost = not FailureWatch.waiting
    if outermost and _watch is not None and _watch.ending:
        _watch.begin_attempt()
    with peers_must_answer():
        try:
            with collective_of(stage, group) if _watch is None else nullcontext():
                yield
        except RankFailedError:
            if _watch is not None:
                _watch.end()
            raise
        except Exception as error:
            if _watch is None or getattr(error, '_mmdevplug_reported', False):
                raise
            if not outermost:
                # A context around this one may explain the error better.
                error._mmdevplug_stage = getattr(error, '_mmdevplug_stage', stage)
                raise
            lost = isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error))
            # Others of ours may well name a backend.
            ours = isinstance(error, DevPlugError) and not isinstance(error, StagedError)
            if lost and not ours:
                raise _watch.explain(error) from error
            error._mmdevplug_reported = True
            _watch.report_error(error, getattr(error, '_mmdevplug_stage', stage))
            raise


def known_to_all(error: Exception) -> Exception:
    """Mark an error that every rank raises by itself, so that none reports it to the others."""
    error._mmdevplug_reported = True  # type: ignore[attr-defined]
    return error


# for ranks that wait in the store ----------------------------------------------------------------


def current_job() -> Optional[Tuple[Any, LaunchEnv]]:
    """The store and how this process was started, None where there is no watch."""
    if _watch is None:
        return None
    # Ranks that failed together may have come to different numbers of meetings before.
    return torch_dist.PrefixStore(f'mmdevplug/{_watch.attempt}', _watch.main_store), _watch.env


def raise_if_another_failed(wait: float = 0.0) -> None:
    """Raise the report of another rank's failure, waiting up to ``wait`` seconds for one."""
    found = None if _watch is None else _watch.peer_failure(wait)
    if found is not None:
        _watch.end()
        raise found


def note_report() -> None:
    """Note that a line has just said what this rank waits for, or is about to."""
    if _watch is not None:
        _watch.reported_at = time.monotonic()


def find_dead(ranks: List[int]) -> List[int]:
    """See :meth:`.heartbeat.Heartbeat.find_dead`."""
    return [] if _watch is None else _watch.heartbeat.find_dead(ranks)


def current_phase() -> Optional[str]:
    """What :func:`enter_phase` set last, None where there is no watch."""
    return None if _watch is None else _watch.heartbeat.phase


def ranks_staying(ranks: List[int], phase: str) -> List[int]:
    """The ranks that have been in a phase for :data:`STAYED_SECONDS`."""
    if _watch is None:
        return []
    seen = {rank: _watch.heartbeat.read(rank) for rank in ranks}
    return [
        rank
        for rank, found in seen.items()
        if found is not None and found.beat.phase == phase and found.beat.seconds >= STAYED_SECONDS
    ]


def lacks_beats(ranks: List[int]) -> bool:
    """Whether one of these ranks has never been seen, and was perhaps not started."""
    return _watch is None or any(_watch.heartbeat.read(rank) is None for rank in ranks)


def missing_ranks_error(
    env: LaunchEnv, ranks: List[int], why: str, alive: bool = False
) -> RankFailedError:
    """Report ranks that did not come, and return what to raise."""
    if _watch is not None:
        return _watch.report_ranks(ranks, why, alive)
    return RankFailedError(f'{env.describe()} stops because of {describe_ranks(ranks)}: {why}')


def describe_ranks(ranks: List[int]) -> str:
    """Name ranks and their last known phases."""
    if _watch is None:
        return list_ranks([f'rank {rank}' for rank in ranks[:DESCRIBED]], len(ranks))
    return _watch.heartbeat.describe_all(ranks)


def store_lost(env: LaunchEnv, error: Exception, stage: str) -> RankFailedError:
    """What to raise when the store does not answer during a wait."""
    if _watch is not None:
        return _watch.store_lost(error)
    return RankFailedError(
        f'{env.describe()} lost the store of the job while it waited in {stage!r}: '
        f'{first_line(error)}. Look at the log of rank 0.'
    )
