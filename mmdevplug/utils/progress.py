"""Show that long work goes on: one line that counts seconds, or a line in the log now and then."""

import sys
import time
from contextlib import ExitStack, contextmanager
from threading import Event, Thread
from typing import Any, Callable, Iterator, Optional

from .logs import log as write_log

#: Seconds before the first line and between lines: on a terminal, and in a log.
ON_TERMINAL = (2.0, 1.0)
IN_LOG = (5.0, 20.0)


@contextmanager
def show_progress(doing: str, log: Optional[Callable[[str], None]] = None) -> Iterator[None]:
    """Show what takes long while it runs, e.g. "planning llama.py, 40 s so far", on rank 0 alone.

    Nothing is shown of short work. A thread prints, and ends with the work: functions that hold
    Python's lock for all of their time delay the lines until they return.

    Args:
        doing (str): What goes on, as the start of a sentence.
        log (callable, optional): Takes lines. Defaults to None: a line on the terminal that is
            written again each second, or lines on the standard error where that is no terminal.
    """
    from torch import distributed as torch_dist  # here: the command does without PyTorch

    if torch_dist.is_available() and torch_dist.is_initialized() and torch_dist.get_rank():
        yield
        return
    done = Event()
    thread = Thread(target=_show, args=(doing, log, done), name='mmdevplug-progress', daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def log_progress(doing: str) -> Any:
    """Call :func:`show_progress` with lines for the log, for work inside a training."""
    return show_progress(doing, write_log)


class SilenceWatch:
    """Logs a line each time that nothing has been logged for long, until it is closed.

    Args:
        describe (callable): Takes the seconds of silence, and returns the line.
        seconds (float): How long nobody waits without a line.
    """

    def __init__(self, describe: Callable[[float], str], seconds: float = 30.0) -> None:
        self._describe, self._seconds = describe, seconds
        self._closed = Event()
        self.restart()
        self._thread = Thread(target=self._run, name='mmdevplug-silence', daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Begin to count anew: something has just been logged, or went on as it should."""
        self._began = time.monotonic()
        self._due = self._seconds

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds / 30):
            silence = time.monotonic() - self._began
            if silence >= self._due:
                self._due += self._seconds
                write_log(self._describe(silence))


def _show(doing: str, log: Optional[Callable[[str], None]], done: Event) -> None:
    start = time.monotonic()
    (wait, interval), write = IN_LOG, log or _write_line
    with ExitStack() as stack:
        if log is None and sys.stderr.isatty():
            (wait, interval), write = ON_TERMINAL, None
        while not done.wait(wait):
            line = f'{doing}, {time.monotonic() - start:.0f} s so far'
            if write is None:
                write = _start_status(stack)
            write(line)
            wait = interval


def _start_status(stack: ExitStack) -> Callable[[str], None]:
    """Show a line that the next one replaces, and that is gone when ``stack`` ends."""
    from rich.console import Console
    from rich.text import Text

    status = stack.enter_context(Console(stderr=True).status(''))
    return lambda line: status.update(Text(line))


def _write_line(line: str) -> None:
    print(f'mmdevplug: {line}', file=sys.stderr, flush=True)
