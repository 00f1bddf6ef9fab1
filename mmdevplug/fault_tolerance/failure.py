"""End all ranks together when one of them fails: the interface of fault tolerance.

One :class:`.failure_watch.FailureWatch` for each process does the work.
"""

import atexit
import re
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Tuple

from mmdevplug.config.accelerator import DEFAULT_HEARTBEAT_TIMEOUT
from mmdevplug.environments.launch import LaunchEnv
from mmdevplug.errors import DevPlugError, RankFailedError, first_line

from .abort import shorten_tracebacks
from .failure_watch import FailureWatch
from .heartbeat import DESCRIBED, list_ranks

_COMMUNICATION = re.compile(
    r'gloo|connection (closed|reset|refused) by peer|nccl|hccl|eccl|processgroup|tcpstore'
    r'|broken pipe',
    re.IGNORECASE,
)

_watch: Optional[FailureWatch] = None
_armed = 0


def watch_for_failures(
    store: Any, own: Any, env: LaunchEnv, heartbeat_timeout: float = DEFAULT_HEARTBEAT_TIMEOUT
) -> None:
    """Begin to beat and to look for failures of other ranks, once in a process.

    Args:
        store (torch.distributed.Store): The store that all ranks share.
        own (torch.distributed.Store): A second connection to it.
        env (LaunchEnv): How this process was started.
        heartbeat_timeout (float): After how many seconds of silence a rank is given up.
    """
    global _watch
    if _watch is None:
        _watch = FailureWatch(store, own, env, heartbeat_timeout, lambda: _armed > 0)
        atexit.register(_watch.stop)
        shorten_tracebacks()
    _watch.heartbeat_timeout = heartbeat_timeout


def current_watch() -> Optional[FailureWatch]:
    """The watch of this process, None in a single process."""
    return _watch


@contextmanager
def armed() -> Iterator[None]:
    """Give other ranks up while they are silent inside this, and only there."""
    global _armed
    _armed += 1
    try:
        yield
    finally:
        _armed -= 1


@contextmanager
def fail_together(stage: str) -> Iterator[None]:
    """Tell the other ranks of an error, and turn a lost connection into the name of its cause.

    Args:
        stage (str): What is being done, for the message.

    Raises:
        RankFailedError: In place of an error of communication, if another rank failed or is gone.
    """
    if _watch is not None and not _armed:
        _watch.begin_attempt()
    with armed():
        try:
            yield
        except RankFailedError:
            if _watch is not None:
                _watch.end()
            raise
        except Exception as error:
            if _watch is None or getattr(error, '_mmdevplug_told', False):
                raise
            if _armed > 1:
                # Whoever is around this may have more to say about the error.
                error._mmdevplug_stage = getattr(error, '_mmdevplug_stage', stage)
                raise
            lost = isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error))
            if lost and not isinstance(error, DevPlugError):  # ours may well name a backend
                raise _watch.explain(error) from error
            error._mmdevplug_told = True
            _watch.report_error(error, getattr(error, '_mmdevplug_stage', stage))
            raise


def known_to_all(error: Exception) -> Exception:
    """Mark an error that all ranks raise by themselves, of which none needs to be told.

    Args:
        error (Exception): Raised inside of :func:`fail_together`, on every rank.

    Returns:
        Exception: The same. Ranks that catch it can go on.
    """
    error._mmdevplug_told = True  # type: ignore[attr-defined]
    return error


# for those that wait in the store ----------------------------------------------------------------


def current_job() -> Optional[Tuple[Any, LaunchEnv]]:
    """The store and this process's place in the job, None where there is no watch."""
    return None if _watch is None else (_watch.store, _watch.env)


def raise_if_another_failed(wait: float = 0.0) -> None:
    """Raise if another rank has reported a failure.

    Args:
        wait (float): For how many seconds to wait for a report.

    Raises:
        RankFailedError: With the report.
    """
    found = None if _watch is None else _watch.peer_failure(wait)
    if found is not None:
        _watch.end()
        raise found


def find_dead(ranks: List[int]) -> List[int]:
    """See :meth:`FailureWatch.find_dead`."""
    return [] if _watch is None else _watch.find_dead(ranks)


def missing_ranks_error(
    env: LaunchEnv, ranks: List[int], why: str, alive: bool = False
) -> RankFailedError:
    """Report ranks that did not come, and return what to raise."""
    if _watch is not None:
        return _watch.report_ranks(ranks, why, alive)
    return RankFailedError(f'{env.describe()} stops because of {describe_ranks(ranks)}: {why}')


def describe_ranks(ranks: List[int]) -> str:
    """Name ranks and what they were last seen doing."""
    if _watch is None:
        return list_ranks([f'rank {rank}' for rank in ranks[:DESCRIBED]], len(ranks))
    return _watch.heartbeat.describe_all(ranks)


def store_lost(env: LaunchEnv, error: Exception, stage: str) -> RankFailedError:
    """What to raise when the store is gone while something is waited for."""
    if _watch is not None:
        return _watch.store_lost(error)
    return RankFailedError(
        f'{env.describe()} lost the store of the job while it waited in {stage!r}: '
        f'{first_line(error)}. Look at the log of rank 0.'
    )
