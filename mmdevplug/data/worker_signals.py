"""Keep workers of data loaders alive when a signal reaches every process of a job."""

import multiprocessing
import os
import signal
import threading
from functools import partial

from torch.utils.data import DataLoader


def keep_workers_from_signals(loader: DataLoader) -> None:
    """Let only the training process end the workers of a data loader."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    before = loader.worker_init_fn or _do_nothing
    if isinstance(before, KeepFromSignals):
        return
    if not isinstance(before, partial):
        before = partial(before)
    keeping = KeepFromSignals(before.func, *before.args, **before.keywords)
    loader.worker_init_fn = keeping


class KeepFromSignals(partial):
    """Initialize a worker process, so that it ignores signals of others than its parent.

    Slurm, systemd, a terminal and torchrun signal all processes of a rank. A rank that saves a
    checkpoint needs its workers until the end of the iteration, but by default a worker dies at
    SIGTERM. MMEngine's ``worker_init_fn`` is a partial function, and code that reads its function
    and arguments finds them here, too.
    """

    def __call__(self, worker_id: int) -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            # Not SIG_IGN, which programs that a dataset starts would inherit.
            signal.signal(number, _do_nothing)
        if hasattr(signal, 'sigwaitinfo'):  # not on macOS
            # A thread that waits for a signal gets its sender, unlike a handler.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            waiting = threading.Thread(target=_end_with_parent, name='mmdevplug-signals')
            waiting.daemon = True
            waiting.start()
        super().__call__(worker_id)


def _do_nothing(*_: object) -> None:
    pass


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    while True:
        found = signal.sigwaitinfo([signal.SIGTERM])
        if parent is None or found.si_pid in (parent.pid, os.getpid()) or not parent.is_alive():
            os._exit(0)
