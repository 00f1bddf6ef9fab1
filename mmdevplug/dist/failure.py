"""When one rank fails: the others learn who it was and why.

A rank that fails leaves a report in the store and waits a moment. On every other rank a thread
looks for such a report, so the name of the culprit has arrived before the lost connection makes
their own collective fail.
"""

import atexit
import json
import logging
import re
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional

from mmdevplug.errors import DevPlugError, RankFailedError

from .launch import LaunchEnv

POLL_SECONDS = 0.5
#: How long a failing rank waits for the others to read its report, and they for it to appear.
GRACE_SECONDS = 5.0

_COMMUNICATION = re.compile(
    r'gloo|connection (closed|reset|refused) by peer|nccl|hccl|eccl|processgroup|tcpstore',
    re.IGNORECASE,
)

_watch: Optional['FailureWatch'] = None


class FailureWatch:
    """Looks for the failure reports of other ranks.

    Args:
        store (torch.distributed.Store): The store that all ranks share.
        env (LaunchEnv): How this process was started.
    """

    def __init__(self, store: Any, env: LaunchEnv) -> None:
        self._store = store
        self._env = env
        self._seen = threading.Event()
        self._stopped = threading.Event()
        self._report: Dict[str, Any] = {}
        self._thread = threading.Thread(target=self._poll, name='mmdevplug-failure', daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread before the interpreter does, which would not wait for it."""
        self._stopped.set()
        self._thread.join(timeout=GRACE_SECONDS)

    def _poll(self) -> None:
        try:
            while not self._stopped.wait(POLL_SECONDS):
                # Not `check`, which the PyTorch of older cards does not have.
                if self._store.add('mmdevplug/failure/count', 0):
                    self._report = json.loads(self._store.get('mmdevplug/failure/report'))
                    self._seen.set()
                    self._store.add('mmdevplug/failure/seen', 1)
                    return
        except RuntimeError as error:
            # The store ended with its rank, which the main thread meets by itself.
            logging.getLogger(__name__).debug('no more failure reports: %s', error)

    def tell(self, error: Exception, stage: str) -> None:
        """Leave this rank's error for the others and give them time to read it."""
        message = f'{type(error).__name__}: {error}'
        report = {'rank': self._env.rank, 'who': self._env.describe(), 'stage': stage}
        try:
            if self._store.add('mmdevplug/failure/count', 1) > 1:
                return  # Another rank was first; one name is enough.
            self._store.set(
                'mmdevplug/failure/report', json.dumps({**report, 'message': message[:2000]})
            )
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline:
                if self._store.add('mmdevplug/failure/seen', 0) >= self._env.world_size:
                    return
                time.sleep(POLL_SECONDS / 5)
        except RuntimeError:
            # Without the store nothing can be told; the error itself is about to be raised.
            print(f'{self._env.describe()} cannot reach the store.', file=sys.stderr)

    def peer_failure(self) -> Optional[Dict[str, Any]]:
        """The report of the rank that failed first, waiting a moment for it; None if none came."""
        self._seen.wait(GRACE_SECONDS)
        return self._report if self._report.get('rank', self._env.rank) != self._env.rank else None


def watch_for_failures(store: Any, env: LaunchEnv) -> None:
    """Begin to look for failures of other ranks, once in a process."""
    global _watch
    if _watch is None:
        _watch = FailureWatch(store, env)
        atexit.register(_watch.stop)


@contextmanager
def fail_together(stage: str) -> Iterator[None]:
    """Tell the other ranks of an error, and turn a lost connection into the name of its cause.

    Args:
        stage (str): What is being done, for the message.

    Raises:
        RankFailedError: In place of an error of communication, if another rank failed or is gone.
    """
    try:
        yield
    except RankFailedError:
        raise
    except Exception as error:
        if _watch is None or getattr(error, '_mmdevplug_told', False):
            raise
        lost = isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error))
        if lost and not isinstance(error, DevPlugError):  # ours may well name a backend
            raise _explain(_watch, error) from error
        error._mmdevplug_told = True
        _watch.tell(error, stage)
        raise


def _explain(watch: FailureWatch, error: RuntimeError) -> RankFailedError:
    me = watch._env.describe()
    report = watch.peer_failure()
    if report is None:
        return RankFailedError(
            f'{me} lost the connection to another rank, which left no message: {error}. It was '
            f'killed (out of memory, SIGKILL) or waits longer than env_cfg.dist_cfg.timeout; look '
            f"at the end of the other ranks' logs and at the kernel log."
        )
    return RankFailedError(
        f'{me} stops because {report["who"]} failed in {report["stage"]}: {report["message"]}'
    )
