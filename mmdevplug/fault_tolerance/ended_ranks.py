"""Say how the ranks of a job ended, from what PyTorch and their own notes tell."""

import json
import logging
import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import psutil

from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.host import available_memory, memory_kills
from mmdevplug.utils.signals import SIGNALS, start_thread

from .abort import abort

#: The exit status that Python gives to a process whose fork server has been killed.
_SERVER_GONE = 255


def describe_end(error: Any, folder: str, kills: int = 0) -> Tuple[int, str]:
    """Return the exit status of a job, and which rank failed, in place of PyTorch's table.

    The rank that ended first may be one that stopped because of another.

    Args:
        error (ChildFailedError): What PyTorch raised.
        folder (str): PyTorch's for logs, where ranks leave notes.
        kills (int): Processes that the kernel had ended for memory when the job began.
    """
    rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
    asked = -failure.exitcode if failure.exitcode < 0 else failure.exitcode - 128
    who = f'rank {rank} (pid {failure.pid})'
    notes = _read_notes(Path(folder))
    own = [local for local, note in notes.items() if not note['because_of_another']]
    killed = memory_kills() - kills
    if killed > 0 and not own:
        limit = available_memory().limit
        allowed = '' if limit is None else f' ({format_bytes(limit)})'
        text = (
            f'the kernel ended {killed} process(es) because the memory of this container'
            f'{allowed} ran out; {who} ended with them. Start fewer processes, with fewer workers '
            f'and smaller batches, or raise the limit.'
        )
    elif own:
        number = own[0] + rank - failure.local_rank
        who = f'rank {number}' if own[0] != failure.local_rank else who
        text = f'{who} failed: {notes[own[0]]["message"]}'
    elif failure.exitcode == _SERVER_GONE:
        text = f'the process that ranks are forked from was killed; {who} and the others ended.'
    elif failure.local_rank in notes:
        text = f'{who} stopped because of another: {notes[failure.local_rank]["message"]}'
    elif os.path.isfile(failure.error_file):  # PyTorch's own, of an error outside of our code
        found = failure.message
        text = f'{who} failed: {found["message"] if isinstance(found, dict) else found}'
    elif failure.exitcode > 0 and asked in SIGNALS:
        text = f'{who} was asked to end by {signal.Signals(asked).name}: all ranks have ended.'
        return failure.exitcode, text
    elif failure.exitcode == -signal.SIGKILL:
        text = (
            f'{who} was ended by SIGKILL, which leaves no message of its own; the other ranks, if '
            f'any, say above where it was. The kernel sends it when memory runs out: look at its '
            f'log (dmesg).'
        )
    else:
        how = f'was ended by {failure.signal_name()}'
        how = how if failure.exitcode < 0 else f'ended with exit status {failure.exitcode}'
        text = f'{who} {how} before the others; its own message is above.'
    return 1, text


def _read_notes(folder: Path) -> Dict[int, Dict[str, object]]:
    """Read what ranks wrote with ``note_for_agent`` since the last restart, by local rank."""
    starts = list(folder.glob('*/attempt_*'))
    newest = max(starts, key=lambda path: int(path.name[8:]), default=folder)
    paths = sorted(newest.glob('*/error.json'), key=lambda path: path.stat().st_mtime_ns)
    notes = {int(path.parent.name): json.loads(path.read_text()) for path in paths}
    # Those of PyTorch are others.
    return {rank: note for rank, note in notes.items() if 'because_of_another' in note}


def silence_torchrun(say: Optional[Callable[[str], None]]) -> None:
    """Print no lines of torchrun; ``say`` gets those about ranks that are started again."""
    handler: logging.Handler = logging.NullHandler()
    if say is not None:
        handler = logging.Handler(logging.ERROR)
        # Without the traceback of PyTorch itself.
        handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    for name in ('torch.distributed.elastic', 'torch.multiprocessing'):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False


def end_without_command(parent: int) -> None:
    """End this rank when the command, or the process that it was forked from, has been killed."""
    command: Any = multiprocessing.parent_process()
    while os.getppid() == parent and not connection.wait([command.sentinel], timeout=0.5):
        pass
    gone = f'the command (pid {command.pid}) that started this rank is gone.'
    if os.getppid() != parent:
        gone = f'the process (pid {parent}) that this rank was forked from is gone.'
    from .failure import current_watch  # it imports PyTorch, and the command this file

    watch = current_watch()
    abort(gone, () if watch is None else watch.before_abort)


def end_with_mim() -> None:
    """End as after SIGTERM when ``mim`` ends, which passes no signal on.

    It runs a script in a child process, or in children of a launcher.
    """
    for process in psutil.Process().parents()[:2]:
        with suppress(psutil.Error):  # it has ended, or is another user's
            if any(os.path.basename(word) == 'mim' for word in process.cmdline()[:2]):
                start_thread(_follow, 'mmdevplug-mim', (process,))


def _follow(process: psutil.Process) -> None:
    process.wait()
    os.kill(os.getpid(), signal.SIGTERM)
