"""Keep two jobs from training in one work directory."""

import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

import psutil

from mmdevplug.errors import CheckpointError
from mmdevplug.utils.atomic_files import PathLike
from mmdevplug.utils.logs import log_warning

from .writing import write_text

NAME = '.lock'
#: How often the holder of a lock touches its file, in seconds.
BEAT_SECONDS = 10.0
#: After how many seconds without a change another host's lock counts as left behind.
SILENT_SECONDS = 6 * BEAT_SECONDS


def check_work_dir(work_dir: PathLike) -> None:
    """Make a work directory; raise CheckpointError if it cannot be made or written to."""
    try:
        os.makedirs(str(work_dir), exist_ok=True)
        with tempfile.TemporaryFile(dir=str(work_dir)):
            pass
    except OSError as error:
        raise _refused(work_dir, error) from error


def _refused(work_dir: PathLike, error: OSError) -> CheckpointError:
    return CheckpointError(
        f'work_dir={str(work_dir)!r} takes no files: {error.strerror}. Expected a folder that '
        f'this user may write to. Choose another --work-dir.'
    )


@contextmanager
def locked_work_dir(work_dir: PathLike, restarted: bool = False) -> Iterator[None]:
    """Hold the lock of a work directory; called by the rank that writes there.

    The lock is a file that names its holder. It is taken over if that process has ended: this is
    known at once on the same host, and on another host after a minute without a heartbeat. A job
    that a scheduler has ``restarted`` takes its own lock on any host.

    Raises:
        CheckpointError: If another job holds it, or the folder takes no files.
    """
    path = Path(work_dir) / NAME
    own = _describe_self()
    taken = _take(path, own, restarted)
    ended = threading.Event()
    if taken:
        threading.Thread(
            target=_beat, args=(path, ended), name='mmdevplug-lock', daemon=True
        ).start()
    try:
        yield
    finally:
        ended.set()
        if taken and _read(path) == own:
            path.unlink()


def _take(path: Path, own: Dict[str, Any], restarted: bool) -> bool:
    """Take a lock; False if an earlier runner of this process holds it."""
    while True:
        try:
            with open(str(path), 'x') as file:
                file.write(json.dumps(own))
            return True
        except FileExistsError:
            found = _read(path)
            if found == own:
                return False
            _check_left_behind(path, found, own, restarted)
            write_text(json.dumps(own), path)
            # Another job may have found the same and come last.
            time.sleep(0.2)
            if _read(path) == own:
                return True
        except OSError as error:
            raise _refused(path.parent, error) from error


def _check_left_behind(
    path: Path, found: Optional[Dict[str, Any]], own: Dict[str, Any], restarted: bool
) -> None:
    """Raise CheckpointError if the holder of a lock is running."""
    if found is None:
        time.sleep(2.0)  # its holder may be writing it
        found = _read(path) or {}
    pid, host, since = (found.get(key, 'unknown') for key in ('pid', 'host', 'since'))
    holder = f'process {pid} on host {host}, which has trained there since {since}'
    same_job = restarted and found.get('job') is not None and found['job'] == own['job']
    if found.get('system') == own['system']:
        runs = _runs(found)
    else:
        runs = not same_job and _changes(path, holder)
    if runs:
        raise CheckpointError(
            f'work_dir={str(path.parent)!r} is in use by {holder} ({path}). Two jobs would '
            f'overwrite each other. Wait for its end, end it, or choose another --work-dir.'
        )
    log_warning(f'{path} was left behind by {holder} and has ended. This job takes it over.')


def _changes(path: Path, holder: str) -> bool:
    """Whether the holder of a lock on another host touches it."""
    log_warning(f'{path} names {holder}. Waiting {SILENT_SECONDS:.0f} s for a sign of life of it.')
    before = _changed(path)
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        if _changed(path) != before:
            return path.exists()
        time.sleep(min(1.0, SILENT_SECONDS / 10))
    return False


def _changed(path: Path) -> Optional[int]:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        try:
            os.utime(str(path))
        except OSError as error:
            # The folder is gone or its server does not answer, which saving reports.
            logging.getLogger(__name__).debug('%s: %s', path, error)


def _read(path: Path) -> Optional[Dict[str, Any]]:
    """The content of a lock; None if there is none, or nothing in it yet."""
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _describe_self() -> Dict[str, Any]:
    # Process ids are unique in a boot of a host, or in a container on it.
    system = [socket.gethostname()]
    if sys.platform == 'linux':
        system.append(Path('/proc/sys/kernel/random/boot_id').read_text().strip())
        system.append(os.readlink('/proc/self/ns/pid'))
    return dict(
        host=socket.gethostname(),
        pid=os.getpid(),
        began=_began(os.getpid()),
        since=time.strftime('%Y-%m-%d %H:%M:%S'),
        system=' '.join(system),
        job=os.environ.get('SLURM_JOB_ID'),
    )


def _runs(found: Dict[str, Any]) -> bool:
    """Whether the holder of a lock runs; another process may have its number by now."""
    try:
        pid = int(found['pid'])
        return (
            _began(pid) == found['began'] and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.NoSuchProcess, FileNotFoundError, KeyError, TypeError, ValueError):
        return False


def _began(pid: int) -> int:
    """When a process began: in ticks since the boot of the host, which no clock changes."""
    if sys.platform != 'linux':
        return int(psutil.Process(pid).create_time())
    # The name, in parentheses, may hold spaces.
    return int(Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[19])
