"""Signals that end a job, in processes with more threads than one.

Python calls handlers in the main thread alone. The kernel gives a signal to any thread that does
not block it, those of gloo and of stores among them. Then the main thread sleeps on, and the
handler waits with it.
"""

import os
import signal
import socket
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Callable, Tuple

#: What a user, a scheduler or a terminal ends a job with.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def start_thread(
    target: Callable[..., object], name: str, args: Tuple[object, ...] = (), daemon: bool = True
) -> threading.Thread:
    """Start a thread that leaves these signals to others.

    Raises:
        RuntimeError: If the interpreter ends, from Python 3.12 on.
    """
    thread = threading.Thread(target=target, name=name, args=args, daemon=daemon)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def follow_signals(act: Callable[[int], None]) -> Callable[[], None]:
    """Call a function in a thread as soon as a signal arrives for which Python has a handler.

    Args:
        act: Takes the signal's number.

    Returns:
        callable: Ends this. Call it in the main thread, as this function.
    """
    _forget_in_children()
    told, tell = socket.socketpair()
    tell.setblocking(False)
    before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)

    def run() -> None:
        with told:
            for byte in iter(lambda: told.recv(1), b''):
                act(byte[0])

    def end() -> None:
        if signal.set_wakeup_fd(before) == tell.fileno():
            tell.close()

    start_thread(run, 'mmdevplug-signals')
    return end


@lru_cache(maxsize=None)
def _forget_in_children() -> None:
    """Let children that are forked say nothing of their signals here."""

    def forget() -> None:
        with suppress(ValueError):  # not the main thread of the main interpreter
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)
