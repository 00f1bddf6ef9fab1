"""Find the checkpoint to resume from: the newest that is whole."""

import logging
import os
import re
import zipfile
from pathlib import Path
from typing import List, Optional

from mmengine.logging import print_log

from mmdevplug.errors import CheckpointError

from .writing import PathLike, replacing, write_text

POINTER = 'last_checkpoint'
STARTED = '.started'
FINISHED = '.finished'


def write_pointer(work_dir: PathLike, checkpoint: str) -> None:
    """Say in ``last_checkpoint`` which checkpoint is the newest, as MMEngine does."""
    write_text(str(checkpoint), Path(work_dir) / POINTER)


def read_pointer(work_dir: PathLike) -> Optional[str]:
    """What ``last_checkpoint`` says, None if there is no such file or nothing in it."""
    path = Path(work_dir) / POINTER
    if not path.is_file():
        return None
    return path.read_text(encoding='utf-8', errors='replace').strip() or None


def mark_start(work_dir: PathLike) -> None:
    """Note when a run began from scratch, so that a restart takes none of an earlier run's files.

    Args:
        work_dir (str or Path): An existing folder.
    """
    with replacing(Path(work_dir) / STARTED) as unfinished:
        unfinished.touch()


def mark_finished(work_dir: PathLike, iteration: Optional[int]) -> None:
    """Note that a run has ended, its last validation included, so that resuming does nothing more.

    Args:
        work_dir (str or Path): An existing folder.
        iteration (int, optional): How many iterations were trained; None to remove the note.
    """
    path = Path(work_dir) / FINISHED
    if iteration is not None:
        write_text(str(iteration), path)
    elif path.exists():
        path.unlink()


def finished_at(work_dir: PathLike) -> Optional[int]:
    """After how many iterations the last run in a folder has ended, None if it has not."""
    path = Path(work_dir) / FINISHED
    text = path.read_text(encoding='utf-8', errors='replace') if path.is_file() else ''
    return int(text) if text.strip().isdigit() else None


def check_file(path: PathLike) -> None:
    """Read all of a checkpoint and compare it with the checksums inside.

    PyTorch leaves them out when it loads a file.

    Args:
        path (str or Path): A file.

    Raises:
        CheckpointError: If the file is truncated or damaged.
        OSError: If it cannot be read.
    """
    if not zipfile.is_zipfile(str(path)):
        if _has_old_format(path):
            return  # Written by a PyTorch before 1.6, without checksums.
        raise CheckpointError(f'{path} ends too early or is no checkpoint')
    try:
        with zipfile.ZipFile(str(path)) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise CheckpointError(f'{path} is damaged: {error}') from error
    if damaged is not None:
        raise CheckpointError(f'{path} is damaged: {damaged} differs from its checksum')


def _has_old_format(path: PathLike) -> bool:
    with open(str(path), 'rb') as file:
        return file.read(2) == b'\x80\x02' and os.path.getsize(str(path)) > 1024


def find_good_checkpoint(work_dir: PathLike, only_this_run: bool = False) -> Optional[str]:
    """Find the newest checkpoint that is whole, and say which could not.

    Args:
        work_dir (str or Path): Where ``last_checkpoint`` is looked for, and where other
            checkpoints are, besides the folder that it names.
        only_this_run (bool): Whether to leave out what is older than the start of the run that
            :func:`mark_start` noted. Defaults to False.

    Returns:
        str or None: A path or an address; None if nothing was saved yet.

    Raises:
        CheckpointError: If there are checkpoints and none is whole.
    """
    pointed = read_pointer(work_dir)
    if pointed is not None and re.match(r'\w+://', pointed):
        return pointed  # An object store has whole objects or none.
    candidates = _candidates(Path(work_dir), pointed)
    if only_this_run:
        candidates = _since_start(Path(work_dir), candidates)
    refused: List[str] = []
    for path in candidates:
        try:
            check_file(path)
        except (CheckpointError, OSError) as error:
            refused.append(str(error))
            print_log(
                f'Cannot resume: {error}. Looking for the checkpoint before it.',
                'current',
                logging.WARNING,
            )
            continue
        return str(path)
    if refused:
        raise CheckpointError(
            f'none of the {len(refused)} checkpoint(s) in {work_dir} is whole; expected one '
            f'that is. Found: {"; ".join(refused)}. Restore one from a backup, or start from '
            f'scratch in another --work-dir.'
        )
    return None


def _candidates(work_dir: Path, pointed: Optional[str]) -> List[Path]:
    """The checkpoint that the pointer names, then the others, newest first."""
    first: List[Path] = []
    folders = [work_dir]
    if pointed is not None:
        path = _relocated(Path(pointed), work_dir)
        folders = list(dict.fromkeys([path.parent, work_dir]))
        if path.exists():
            first = [path]
        else:
            print_log(
                f'{work_dir / POINTER} names {pointed}, which does not exist. Looking for others.',
                'current',
                logging.WARNING,
            )
    others = {
        path.resolve(): path
        for folder in folders
        for path in folder.glob('*.pth')
        # Best checkpoints hold no optimizer state.
        if path.is_file() and _is_numbered(path)
    }
    ordered = sorted(others.values(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return first + [path for path in ordered if path not in first]


def _relocated(path: Path, work_dir: Path) -> Path:
    """A pointer's target beside the pointer, if the folder was moved after it was written."""
    beside = work_dir / path.name
    return path if path.exists() or not beside.exists() else beside


def _is_numbered(path: Path) -> bool:
    return re.fullmatch(r'(?!best_).*\d', path.stem) is not None


def _since_start(work_dir: Path, candidates: List[Path]) -> List[Path]:
    marker = work_dir / STARTED
    if not marker.exists():
        return []
    started = marker.stat().st_mtime_ns
    return [path for path in candidates if path.stat().st_mtime_ns >= started]
