"""Forward signals from the process that started a job to the ranks, which save and end."""

import logging
import os
import signal
import time
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, Dict, Iterator, NoReturn, Optional, Sequence

import psutil

from mmdevplug.environments.torchrun import MOST_RANKS
from mmdevplug.fault_tolerance import SAME_NOTICE_SECONDS

#: Signals that ranks may handle without ending.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
#: What a user, a scheduler or a terminal ends a job with.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *_NOTICES)
#: How long ranks may take to save and end before they are killed.
SAVE_SECONDS = 300.0
#: How long other processes may take to end after SIGTERM.
_LEFTOVER_SECONDS = 5.0
#: Between two checks of a parent process.
_FOLLOW_SECONDS = 0.5


def exit_status(number: int) -> int:
    """Return the exit status that shells give to a process that a signal ended."""
    return 128 + number


class RankSignals:
    """Pass signals on to the ranks that this process started, and wait for their end.

    PyTorch's agent kills its ranks 30 s after a signal, knows nothing of SIGUSR1, leaves behind
    what it was about to start, and signals the workers of data loaders too, without which a rank
    cannot finish its iteration.
    """

    def __init__(self, server: Optional[int] = None) -> None:
        self._server = server  # the process id of the one that ranks are forked from
        #: The signal that ended the job, None so far.
        self.number: Optional[int] = None
        self._at = 0.0
        self._impatient = False
        # Under `nohup`; ranks inherit it.
        ignores_hup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._ignored = [signal.SIGHUP] if ignores_hup else []
        #: Whether all ranks ended with status 0 after the signal.
        self.ended_well = False
        #: Signals are ignored: this process is about to end.
        self.closed = False

    def install(self) -> None:
        """Handle signals from now on."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in self._ignored else self.handle)

    def handle(self, number: int, _: Any = None) -> None:
        """Pass a signal on, and raise SignalException if not all ranks end with status 0.

        An agent of an elastic job ends in any case: training goes on without its host.
        """
        if self.closed:
            return
        if self.number is not None:
            self._impatient |= time.monotonic() - self._at >= SAME_NOTICE_SECONDS
            return
        self.number, self._at = number, time.monotonic()
        ranks = [one for one in psutil.Process().children() if one.pid != self._server]
        name = signal.Signals(number).name
        if ranks:
            _say(
                f'{name} is passed on to {len(ranks)} process(es), which save a checkpoint if '
                f'they train, and end. A second signal kills them.'
            )
        for rank in ranks:
            _send(rank, number)
        if not self._wait_for(ranks) and number in _NOTICES:
            self.number = None  # The ranks took it for something else.
            return
        self.ended_well = bool(ranks) and all(_ended_well(rank.pid) for rank in ranks)
        # An agent whose ranks ended well takes that for the end of training: it waits for the
        # other hosts of an elastic job, and then lets none of them go on.
        if not self.ended_well or MOST_RANKS in os.environ:
            from torch.distributed.elastic.multiprocessing.api import SignalException

            # torchrun's lines about this signal and about ranks that have ended.
            logging.disable(logging.WARNING)
            raise SignalException(f'got {name}', sigval=signal.Signals(number))

    def _wait_for(self, ranks: Sequence[psutil.Process]) -> bool:
        """Wait until processes have ended, and kill them if they take too long."""
        patience = self._at + SAVE_SECONDS
        while any(_runs(rank) for rank in ranks):
            late = time.monotonic() >= patience
            if late and not self._impatient and self.number in _NOTICES:
                return False
            if late or self._impatient:
                _say(
                    f'killing {sum(map(_runs, ranks))} process(es) '
                    + ('after a second signal.' if self._impatient else 'that have not ended.')
                )
                for rank in ranks:
                    _kill_tree(rank)
                patience = float('inf')
                self._impatient = False
            time.sleep(0.05)
        return True


def end_leftovers() -> None:
    """End every process below this one."""
    alive = psutil.Process().children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            _send(process, number)
        _, alive = psutil.wait_procs(alive, timeout=_LEFTOVER_SECONDS)


def _kill_tree(process: psutil.Process) -> None:
    """Kill a process and all that it started."""
    with suppress(psutil.NoSuchProcess):
        for one in [process, *process.children(recursive=True)]:
            _send(one, signal.SIGKILL)


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ended_well(pid: int) -> bool:
    """Whether a child ended with status 0; the status can still be read by others.

    A child whose main thread has ended is a zombie already, and has no status until its other
    threads have ended too.
    """
    if not hasattr(os, 'waitid'):  # macOS
        return False
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is not None and found.si_code == os.CLD_EXITED and found.si_status == 0


def _say(text: str) -> None:
    # A handler must not write to a stream that it may have interrupted.
    os.write(2, f'mmdevplug: {text}\n'.encode())


# before the agent runs ---------------------------------------------------------------------------


def end_on_signals() -> None:
    """Let the signals that end a process end this one as process 1 of a container, too.

    The kernel drops signals to process 1 that it has no handler for.
    """
    if os.getpid() != 1:
        return
    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, _: Any) -> NoReturn:
    _say(f'ended by {signal.Signals(number).name}.')
    # Not SystemExit: MMEngine catches it in places and goes on with an error of another kind.
    os._exit(exit_status(number))


@contextmanager
def end_children_on_signals() -> Iterator[None]:
    """Let signals end this process and kill those below it, until others handle them."""
    before: Dict[int, Any] = {}

    def stop(number: int, frame: Any) -> None:
        for process in psutil.Process().children(recursive=True):
            _send(process, signal.SIGKILL)
        _exit(number, frame)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def end_with_mim() -> None:
    """End as after SIGTERM when ``mim`` ends, which passes no signal on.

    It runs a script in a child process, or in children of a launcher.
    """
    for process in psutil.Process().parents()[:2]:
        try:
            words = process.cmdline()[:2]
        except psutil.Error:
            continue
        if any(os.path.basename(word) == 'mim' for word in words):
            follow = Thread(target=_follow, args=(process,), name='mmdevplug-mim', daemon=True)
            follow.start()


def _follow(process: psutil.Process) -> None:
    while _runs(process):
        time.sleep(_FOLLOW_SECONDS)
    _say('mim has ended: this process ends as after SIGTERM.')
    os.kill(os.getpid(), signal.SIGTERM)
