"""Keep compiled graphs on disk: the option ``accelerator.compilation_cache``."""

import os
import warnings
from typing import Any, Optional

from mmdevplug.errors import AcceleratorError

from .base import Accelerator, KeptGraphs


def check_compilation_cache(option: Any, work_dir: Optional[str] = None) -> Optional[str]:
    """Check the option.

    Args:
        option (str or bool, optional): A folder; True for ``compilation_cache`` in the work
            directory; None or False for none.
        work_dir (str, optional): The work directory. Defaults to None: there is none.

    Returns:
        str or None: The folder.

    Raises:
        AcceleratorError: If it is something else, or there is no work directory to put it into.
    """
    if option is None or option is False:
        return None
    if option is True and work_dir is not None:
        return os.path.join(work_dir, 'compilation_cache')
    if isinstance(option, (str, os.PathLike)) and str(option):
        return os.path.abspath(option)
    accepted = (
        'a folder' if work_dir is None else 'a folder, or True for one in the work directory'
    )
    raise AcceleratorError(f'accelerator.compilation_cache={option!r}: expected {accepted}.')


def start_compilation_cache(accelerator: Accelerator, folder: str, rank: int) -> None:
    """Keep the graphs that this rank compiles, in a folder of its own.

    Where that is not possible, a warning says why, and training goes on without.

    Args:
        accelerator (Accelerator): Not used yet.
        folder (str): For all ranks; each makes one inside.
        rank (int): The rank of this process.

    Raises:
        AcceleratorError: If the folder cannot be written.
    """
    own = os.path.join(folder, f'rank_{rank}')
    try:
        os.makedirs(own, exist_ok=True)
        writable = os.access(own, os.W_OK | os.X_OK)
    except OSError as error:
        raise AcceleratorError(
            f'accelerator.compilation_cache={folder!r}: {own} cannot be made: {error}. Name a '
            f'folder that every rank can write to.'
        ) from error
    if not writable:
        raise AcceleratorError(
            f'accelerator.compilation_cache={folder!r}: {own} cannot be written to. Name a folder '
            f'that every rank can write to.'
        )
    why_not = accelerator.keep_compilations(own)
    if why_not is not None and rank == 0:
        warnings.warn(
            f'accelerator.compilation_cache={folder!r} is of no use here: {why_not}. Remove it.',
            stacklevel=2,
        )


def describe_kept(kept: KeptGraphs) -> str:
    """One line for the log.

    Args:
        kept (KeptGraphs): What became of graphs.
    """
    told = (
        f'compilation cache {kept.folder}: {kept.read} graphs read, {kept.missed} compiled and '
        f'written'
    )
    if kept.unreadable:
        told += (
            f', {kept.unreadable} found that could not be read and were compiled again. Either '
            f'another release of torch_xla wrote them (delete the folder), or this device cannot '
            f'read compiled graphs (remove accelerator.compilation_cache)'
        )
    return f'{told}.'
