"""Write files atomically."""

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Optional, Union

from mmdevplug.errors import DevPlugError

#: Suffix of a file that is being written, before the number of the process.
UNFINISHED = '.unfinished-'

PathLike = Union[str, Path]


@contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to ``path`` when it is on the disk.

    After an error, a crash or with a full disk, an earlier file at ``path`` is still there.
    """
    path = Path(path)
    unfinished = path.with_name(f'{path.name}{UNFINISHED}{os.getpid()}')
    try:
        yield unfinished
        _flush(unfinished)
        os.replace(str(unfinished), str(path))
        _flush(path.parent)
    finally:
        if unfinished.exists():
            unfinished.unlink()


def write_text(text: str, path: PathLike) -> None:
    """Write a small file; see :func:`replacing`."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding='utf-8')


def _flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: str, option: str) -> None:
    """Raise if a file, named by an option, cannot be written."""
    target = Path(path)
    hint = f'Give {option} a file in a folder that exists and may be written to.'
    if target.is_dir():
        raise DevPlugError(f'{option} {path!r} is a folder, expected a file. {hint}')
    try:
        with tempfile.NamedTemporaryFile(dir=str(target.parent), prefix='.doctor-'):
            pass
    except OSError as error:
        raise DevPlugError(f'{option} {path!r} cannot be written: {error}. {hint}') from error


def check_json(path: Optional[str]) -> None:
    """Raise if the file of an option ``--json`` cannot be written; ``-`` is standard output."""
    if path not in (None, '-'):
        check_writable(str(path), '--json')


def write_json(value: object, path: str) -> None:
    """Write the file of an option ``--json``."""
    text = json.dumps(value, indent=1)
    if path == '-':
        print(text)
    else:
        write_text(text, path)


def has_temporary_folder(say: Callable[[str], None]) -> bool:
    """Whether any folder takes temporary files, which PyTorch's processes need; say so if not."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        say(
            f'TMPDIR={os.environ.get("TMPDIR")!r}: {error.strerror}, but PyTorch and this command '
            f'need one that can be written to. Mount one at /tmp, or name one: export TMPDIR=...'
        )
        return False
    return True
