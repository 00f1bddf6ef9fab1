"""The files that the doctor writes are refused before it begins."""

import tempfile
from pathlib import Path

from mmdevplug.errors import DevPlugError


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
