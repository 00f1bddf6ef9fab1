"""Write files so that a crash, a kill or a full disk leaves the earlier ones whole."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Union

from mmdevplug.errors import DevPlugError

#: Ends the name of a file that is being written; followed by the number of the process.
UNFINISHED = '.unfinished-'

PathLike = Union[str, Path]


@contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """Write a file under another name and give it its own when it is on the disk.

    Args:
        path (str or Path): The file, in a folder that exists.

    Yields:
        Path: Where to write. Whatever is raised, what was at ``path`` before is still there.
    """
    path = Path(path)
    unfinished = path.with_name(f'{path.name}{UNFINISHED}{os.getpid()}')
    try:
        yield unfinished
        _flush(unfinished)
        os.replace(str(unfinished), str(path))
        _flush(path.parent)
    finally:
        # After a successful replacement there is nothing of that name.
        if unfinished.exists():
            unfinished.unlink()


def write_text(text: str, path: PathLike) -> None:
    """Write a small file; see :func:`replacing`."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding='utf-8')


def _flush(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: str, option: str) -> None:
    """Refuse a file that cannot be written, by making one beside it.

    Args:
        path (str): The file.
        option (str): The option that named it, for the message.

    Raises:
        DevPlugError: If the folder does not take a file.
    """
    target = Path(path)
    hint = f'Give {option} a file in a folder that exists and may be written to.'
    if target.is_dir():
        raise DevPlugError(f'{option} {path!r} is a folder, expected a file. {hint}')
    try:
        with tempfile.NamedTemporaryFile(dir=str(target.parent), prefix='.doctor-'):
            pass
    except OSError as error:
        raise DevPlugError(f'{option} {path!r} cannot be written: {error}. {hint}') from error
