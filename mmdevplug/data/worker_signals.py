"""Keep workers of data loaders alive when a signal reaches every process of a job."""

import multiprocessing
import os
import signal
import threading
from functools import partial
from typing import Any

from torch.utils.data import DataLoader


def keep_workers_from_signals(loader: Any) -> None:
    """Let the workers of a data loader end only when their training process wants them to.

    Args:
        loader (DataLoader): Changed in place.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    before = loader.worker_init_fn
    if before is None:
        loader.worker_init_fn = KeepFromSignals(_do_nothing)
    elif isinstance(before, partial) and not isinstance(before, KeepFromSignals):
        loader.worker_init_fn = KeepFromSignals(before.func, *before.args, **before.keywords)
    elif not isinstance(before, KeepFromSignals):
        loader.worker_init_fn = KeepFromSignals(before)


class KeepFromSignals(partial):
    """What a worker process does first, see :func:`keep_workers_from_signals`.

    Slurm, systemd, a terminal and torchrun signal all processes of a rank. A rank that is about to
    save needs its workers until the end of the iteration, but by itself a worker dies at SIGTERM.
    MMEngine's ``worker_init_fn`` is a partial function, and code that looks into it finds the same
    function and arguments here.
    """

    def __call__(self, worker_id: int) -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            # Not SIG_IGN, which programs that a dataset starts would inherit.
            signal.signal(number, _ignore)
        if hasattr(signal, 'sigwaitinfo'):  # not on macOS
            self._wait()
        super().__call__(worker_id)

    @staticmethod
    def _wait() -> None:
        # Whoever waits for a signal learns who sent it, unlike a handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_with_parent, name='mmdevplug-signals', daemon=True).start()


def _do_nothing(worker_id: int) -> None:
    """Stand for the ``worker_init_fn`` of a loader that has none."""


def _ignore(number: int, frame: Any) -> None:
    """Do nothing."""


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    while True:
        found = signal.sigwaitinfo([signal.SIGTERM])
        if parent is None or found.si_pid in (parent.pid, os.getpid()) or not parent.is_alive():
            os._exit(0)
