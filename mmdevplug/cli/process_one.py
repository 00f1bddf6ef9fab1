"""Be process 1 of a container: pass signals on to the command, and reap orphans."""

import os
import signal
from contextlib import suppress

#: What schedulers, users and terminals send, and what the kernel sends when a child ends.
_SIGNALS = {
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD),
}


def leave_process_one() -> None:
    """Go on in a child process if this process is process 1.

    Process 1 gets no signal that it has no handler for, and becomes the parent of every process
    whose own parent ended, such as the data loader workers of a rank that was killed. Nothing but
    process 1 removes these from the process table.

    Call it before PyTorch is imported: packages of vendors may start threads then, which a fork
    does not copy.
    """
    if os.getpid() != 1:
        return
    # A signal that comes before `sigwaitinfo` waits for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        found = signal.sigwaitinfo(_SIGNALS)
        if found.si_signo == signal.SIGCHLD:
            _reap(child)
        elif found.si_code <= 0:  # above 0: Ctrl-C, which the terminal sends to the child, too
            os.kill(child, found.si_signo)


def _reap(child: int) -> None:
    """Remove ended children from the process table, and end with the status of one of them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                ended = os.WIFSIGNALED(status)
                os._exit(128 + os.WTERMSIG(status) if ended else os.WEXITSTATUS(status))
            if pid == 0:
                return
