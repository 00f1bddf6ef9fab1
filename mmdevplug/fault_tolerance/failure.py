"""End all ranks together when one of them fails: the interface of fault tolerance.

One :class:`.failure_watch.FailureWatch` for each process does the work.
"""

import atexit
import re
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Callable, Iterator, Optional, Tuple

from torch import distributed as torch_dist

from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import DevPlugError, RankFailedError, StagedError
from mmdevplug.utils.torch_compat import THREADS_SHARE_STORES, LockedStore

from .abort import shorten_tracebacks
from .failure_watch import PROCESS, FailureWatch

_COMMUNICATION = re.compile(
    r'gloo|connection (closed|reset|refused) by peer|nccl|hccl|eccl|processgroup|tcpstore'
    r'|broken pipe|\(process \d+\) (ended|left the group|did not )',
    re.IGNORECASE,
)


def watch_for_failures(
    store: 'torch_dist.Store', prefix: str, env: LaunchEnv, timeout: timedelta
) -> None:
    """Publish this rank's heartbeat and look for failures of other ranks, once in a process."""
    if PROCESS.watch is not None:
        return
    # A second connection, which is free while the main thread waits in the first.
    own: Any = torch_dist.TCPStore(
        env.master_addr, env.master_port, timeout=timeout, wait_for_workers=False
    )
    own = torch_dist.PrefixStore(f'{prefix}/watch', own)
    if not THREADS_SHARE_STORES:
        own = LockedStore(own)
    PROCESS.watch = FailureWatch(store, own, env)
    atexit.register(PROCESS.watch.stop)
    shorten_tracebacks()


def current_watch() -> Optional[FailureWatch]:
    """The watch of this process, None in a single process."""
    return PROCESS.watch


def enter_phase(text: str) -> None:
    """Set what this rank does now, which the others name if it is late; takes under 1 µs.

    Examples:
        >>> enter_phase('saving a checkpoint')
    """
    if PROCESS.watch is not None:
        PROCESS.watch.heartbeat.enter_phase(text)


def before_abort(callback: Callable[[], object]) -> None:
    """Register a function to be called before a process is ended that hangs in its main thread."""
    if PROCESS.watch is not None:
        PROCESS.watch.before_abort.append(callback)


@contextmanager
def peers_must_answer() -> Iterator[None]:
    """Treat the silence of another rank as its failure inside this context, and only there."""
    if not PROCESS.waiting:
        PROCESS.waiting_since = time.monotonic()
    PROCESS.waiting += 1
    try:
        yield
    finally:
        PROCESS.waiting -= 1


@contextmanager
def fail_together(stage: str) -> Iterator[None]:
    """Report an error to the other ranks, and replace a lost connection with its cause.

    Args:
        stage (str): What is being done, for the message.

    Raises:
        RankFailedError: In place of an error of communication, if another rank failed or is gone.
    """
    outermost = not PROCESS.waiting
    if outermost and PROCESS.watch is not None and PROCESS.watch.ending:
        PROCESS.watch.begin_attempt()
    with peers_must_answer():
        try:
            yield
        except RankFailedError:
            if PROCESS.watch is not None:
                PROCESS.watch.end()
            raise
        except Exception as error:
            if PROCESS.watch is None or getattr(error, '_mmdevplug_reported', False):
                raise
            if not outermost:
                # A context around this one may explain the error better.
                vars(error).setdefault('_mmdevplug_stage', stage)
                raise
            lost = isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error))
            # Others of ours may well name a backend.
            ours = isinstance(error, DevPlugError) and not isinstance(error, StagedError)
            if lost and not ours:
                raise PROCESS.watch.explain(error) from error
            known_to_all(error)
            PROCESS.watch.report_error(error, getattr(error, '_mmdevplug_stage', stage))
            raise


def known_to_all(error: Exception) -> Exception:
    """Mark an error that every rank raises by itself, so that none reports it to the others."""
    error._mmdevplug_reported = True  # type: ignore[attr-defined]
    return error


def current_job() -> Optional[Tuple['torch_dist.Store', LaunchEnv]]:
    """The store and how this process was started, None where there is no watch."""
    watch = PROCESS.watch
    if watch is None:
        return None
    # Ranks that failed together may have come to different numbers of meetings before.
    return torch_dist.PrefixStore(f'mmdevplug/{watch.attempt}', watch.main_store), watch.env


def raise_if_another_failed(wait: float = 0.0) -> None:
    """Raise the report of another rank's failure, waiting up to ``wait`` seconds for one."""
    watch = PROCESS.watch
    failure = None if watch is None else watch.peer_failure(wait)
    if watch is not None and failure is not None:
        watch.end()
        raise failure
