"""Show that long work goes on by a line now and then."""

import time
from contextlib import contextmanager
from threading import Event
from typing import Callable, Iterator, Optional, Union

from .logs import log as write_log
from .signals import start_thread

#: Seconds before the first line and between lines.
IN_LOG = (5.0, 20.0)


@contextmanager
def show_progress(
    doing: Union[str, Callable[[], str]], log: Optional[Callable[[str], None]] = None
) -> Iterator[None]:
    """Show what takes long while it runs, e.g. "planning llama.py, 40 s so far", on rank 0 alone.

    Nothing is shown of short work. A thread prints, and ends with the work: functions that hold
    Python's lock for all of their time delay the lines until they return.

    Args:
        doing (str or callable): What goes on, as the start of a sentence, or what returns it.
        log (callable): Takes lines. Defaults to None: the log, for work inside a training.
    """
    from torch import distributed as torch_dist  # here: the command does without PyTorch

    if torch_dist.is_available() and torch_dist.is_initialized() and torch_dist.get_rank():
        yield
        return
    done = Event()
    thread = start_thread(_show, 'mmdevplug-progress', (doing, log or write_log, done))
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(doing: Union[str, Callable[[], str]], log: Callable[[str], None], done: Event) -> None:
    start, (wait, interval) = time.monotonic(), IN_LOG
    while not done.wait(wait):
        text = doing if isinstance(doing, str) else doing()
        log(f'{text}, {time.monotonic() - start:.0f} s so far')
        wait = interval
