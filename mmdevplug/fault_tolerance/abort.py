"""End this process, and report why in the log and to torchrun's agent."""

import json
import logging
import multiprocessing
import os
import sys
import time
from types import TracebackType
from typing import Callable, Optional, Sequence, Type

from mmdevplug.errors import RankFailedError, first_line
from mmdevplug.utils.atomic_files import write_text
from mmdevplug.utils.logs import current_logger
from mmdevplug.utils.signals import start_thread

#: How long the functions that are called before an abort may take together.
ABORT_SECONDS = 10.0

#: How a message begins about a rank whose process has ended without a word.
GONE = 'the process is gone and left no message'


def shorten_tracebacks() -> None:
    """Print one line in place of the traceback where another rank failed."""
    before = sys.excepthook

    def hook(
        kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]
    ) -> None:
        note_for_agent(error)
        if isinstance(error, RankFailedError):
            print(f'mmdevplug: {error.one_line()}', file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def note_for_agent(error: BaseException) -> None:
    """Write the error that ends this process where torchrun's agent reads it.

    The rank that ends first is often not the one that failed: that one waits until the others have
    read its report.
    """
    path = note_path()
    if path is None:
        return
    note = dict(
        message=f'{type(error).__name__}: {first_line(error)}'[:1000],
        timestamp=int(time.time()),
        because_of_another=isinstance(error, RankFailedError),
        gone=GONE in str(error),
    )
    try:
        write_text(json.dumps(note), path)
    except OSError as failed:
        logging.getLogger(__name__).debug('no note in %s: %s', path, failed)


def forget_note() -> None:
    """Remove the note of an error after which this process goes on."""
    path = note_path()
    if path is not None and os.path.exists(path):
        os.unlink(path)


def note_path() -> Optional[str]:
    """Return where torchrun reads the error of this rank; None where it did not start it."""
    if 'TORCHELASTIC_RUN_ID' not in os.environ:
        return None
    return os.environ.get('TORCHELASTIC_ERROR_FILE')


def abort(message: str, callbacks: Sequence[Callable[[], object]] = ()) -> None:
    """End this process, even if its main thread hangs, with a message in the log.

    ``callbacks`` are called before, from another thread than the main one, which may hang
    anywhere. All of them together have a few seconds.
    """
    say(f'RankFailedError: {message}', logging.ERROR)
    note_for_agent(RankFailedError(message))

    def run() -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception as error:
                print(f'mmdevplug: {type(error).__name__}: {error}', file=sys.stderr, flush=True)
        logging.shutdown()

    start_thread(run, 'mmdevplug-abort').join(ABORT_SECONDS)
    for child in multiprocessing.active_children():  # workers of data loaders, which may hang
        child.kill()
    # A collective that hangs in the driver or in the kernel cannot be cancelled.
    os._exit(1)


def say(text: str, level: int = logging.WARNING) -> None:
    """Write to the log, and to the standard error where this rank's log is not shown."""
    logger = current_logger()
    if logger is not None:
        logger.log(level, text)
    shown = logger is not None and any(
        type(handler) is logging.StreamHandler and handler.level <= level
        for handler in logger.handlers
    )
    if not shown:
        print(f'mmdevplug: {text}', file=sys.stderr, flush=True)
