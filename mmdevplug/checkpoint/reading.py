"""Find the newest checkpoint that is whole, for all ranks alike, and read it running no code."""

import os
import re
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional

import torch
from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.environments.launch_variables import LaunchEnv, restarts
from mmdevplug.errors import CheckpointError
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.file_kinds import describe_no_checkpoint
from mmdevplug.utils.logs import log_warning

from .writing import FINISHED, POINTER, SHARDS, STARTED, PathLike, is_local, write_text


def read_checkpoint(
    filename: str, map_location: Any = 'cpu', mapped: bool = False
) -> Dict[str, Any]:
    """Read a checkpoint from a path, or an address that MMEngine knows (``https://``, ...).

    With ``mapped`` the tensors of a file stay on the disk until they are copied.
    A file that is no checkpoint, or holds classes other than MMEngine's, raises CheckpointError.
    """
    filename = os.path.expanduser(str(filename))
    with safe_loading(filename):
        if os.path.isfile(filename):
            options = dict(mmap=True) if mapped else {}
            read = torch.load(filename, map_location=map_location, **options)
        else:
            read = CheckpointLoader.load_checkpoint(filename, map_location)
    # The T20's rebuild function sends tensors to the current card, whatever map_location says.
    return to_device(read, 'cpu') if map_location == 'cpu' else read


def read_for_model(
    filename: str, map_location: Any, mapped: bool, model: nn.Module
) -> Dict[str, Any]:
    """Read a checkpoint that has weights, alone or under ``state_dict``, where they are then.

    Those of a model's shards are in a folder beside the file.
    """
    checkpoint = read_checkpoint(filename, map_location, mapped)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f'checkpoint {filename} is of type {type(checkpoint).__name__}; expected a dict with '
            f'weights by name, or with them under state_dict. Save it so.'
        )
    if 'state_dict' not in checkpoint:
        if any(isinstance(value, Tensor) for value in checkpoint.values()):
            return dict(state_dict=checkpoint)
        checkpoint = dict(checkpoint, state_dict=checkpoint)
    if not isinstance(checkpoint['state_dict'], Mapping):
        raise CheckpointError(
            f'state_dict of checkpoint {filename} is of type '
            f'{type(checkpoint["state_dict"]).__name__}; expected weights by name. Save it so.'
        )
    if SHARDS in checkpoint:
        from mmdevplug.sharding.states import attach_shards

        attach_shards(
            checkpoint, os.path.join(os.path.dirname(filename), checkpoint[SHARDS]), model
        )
    return checkpoint


# finding -----------------------------------------------------------------------------------------


def read_pointer(work_dir: PathLike) -> Optional[str]:
    """Read ``last_checkpoint``; None if there is no such file or nothing in it."""
    path = Path(work_dir) / POINTER
    if not path.is_file():
        return None
    return path.read_text(encoding='utf-8', errors='replace').strip() or None


def is_finished(work_dir: PathLike) -> bool:
    """Whether the last run in a folder has ended: that was noted after its last checkpoint."""
    saved, ended = Path(work_dir) / POINTER, Path(work_dir) / FINISHED
    both = saved.is_file() and ended.is_file()
    return both and saved.stat().st_mtime_ns <= ended.stat().st_mtime_ns


def check_file(path: PathLike) -> None:
    """Read all of a checkpoint and compare its checksums, which PyTorch does not when it loads.

    Raises CheckpointError if the file is truncated or damaged, OSError if it cannot be read.
    """
    if not zipfile.is_zipfile(str(path)):
        with open(str(path), 'rb') as file:
            if file.read(2) == b'\x80\x02' and os.path.getsize(str(path)) > 1024:
                return  # written by a PyTorch before 1.6, without checksums
        kind = describe_no_checkpoint(path) or 'truncated or no checkpoint'
        raise CheckpointError(f'{path} is {kind}')
    try:
        with zipfile.ZipFile(str(path)) as archive:
            if min((each.header_offset for each in archive.infolist()), default=1):
                # Another archive inside of it: the bytes of states are one, too.
                raise zipfile.BadZipFile('it is truncated')
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise CheckpointError(f'{path} is damaged: {error}') from error
    if damaged is not None:
        raise CheckpointError(f'{path} is damaged: {damaged} differs from its checksum')


def find_good_checkpoint(work_dir: PathLike, only_this_run: bool = False) -> Optional[str]:
    """Find the newest checkpoint that is whole, and log those that are not.

    The folder that ``last_checkpoint`` names is searched, too. Returns a path or an address, None
    if nothing was saved yet; raises CheckpointError if there are checkpoints and none is whole.

    Args:
        work_dir (str or Path): With ``last_checkpoint``.
        only_this_run (bool): Whether to leave out files that are older than the start which
            was noted. Defaults to False.
    """
    pointed = read_pointer(work_dir)
    if pointed is not None and re.match(r'\w+://', pointed):
        return pointed  # An object store has whole objects or none.
    candidates = _candidates(Path(work_dir), pointed)
    if only_this_run:
        marker = Path(work_dir) / STARTED
        started = marker.stat().st_mtime_ns if marker.exists() else float('inf')
        candidates = [path for path in candidates if path.stat().st_mtime_ns >= started]
    refused: List[str] = []
    for path in candidates:
        try:
            check_file(path)
        except (CheckpointError, OSError) as error:
            refused.append(str(error))
            log_warning(f'Cannot resume: {error}. Looking for the checkpoint before it.')
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
        path = Path(pointed)
        if not path.exists() and (work_dir / path.name).exists():
            path = work_dir / path.name  # the folder was moved
        folders = [path.parent, work_dir]
        if path.exists():
            first = [path]
        else:
            log_warning(
                f'{work_dir / POINTER} names {pointed}, which does not exist. Looking for others.'
            )
    # Best checkpoints hold no optimizer state.
    others = [one for one in newest_files(folders) if re.fullmatch(r'(?!best_).*\d', one.stem)]
    return first + [path for path in others if path not in first]


def newest_files(folders: Iterable[Path]) -> List[Path]:
    """List the checkpoints in folders, newest first."""
    found = {
        path.resolve(): path
        for folder in folders
        for path in folder.glob('*.pth')
        if path.is_file()
    }
    return sorted(found.values(), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _named_checkpoint(runner: AnyRunner) -> Optional[str]:
    """The checkpoint that was named to resume from, None for the newest.

    ``load_from`` of a file without ``resume`` is what training begins with, though MMEngine's
    runner resumes from it once a script sets ``resume``, and others remove it then.
    """
    if isinstance(runner._resume, str):  # of our command
        return None if runner._resume == 'auto' else runner._resume
    path = getattr(runner.cfg, 'filename', None)
    if not (runner._resume and path and os.path.isfile(path)):
        return runner._load_from
    written = Config.fromfile(path, import_custom_modules=False)
    if written.get('resume'):
        return runner._load_from
    if runner._load_from is None:
        runner._load_from = written.get('load_from')
    return None if runner._load_from == written.get('load_from') else runner._load_from


def find_resume_point(runner: AnyRunner) -> Optional[str]:
    """Find the checkpoint to resume from on rank 0; None if training does not resume.

    A job that torchrun or Slurm has restarted resumes without being asked to.
    """
    load_from, resume = _named_checkpoint(runner), bool(runner._resume)
    work_dir, env = runner.work_dir, runner.device_context.env
    found = run_on_main(
        'finding the checkpoint to resume from', lambda: _find(work_dir, load_from, resume, env)
    )
    if found is None and resume:
        print_log(f'No checkpoint in {work_dir} to resume from yet.', 'current')
    if found is not None and is_local(found) and not os.path.exists(found):
        raise CheckpointError(
            f'rank 0 resumes from {found}, which is not there for {env.describe()}. Put the work '
            f'directory on a file system that all hosts share, under the same path, or copy the '
            f'file to every host.'
        )
    return found


def _find(work_dir: str, load_from: Optional[str], resume: bool, env: LaunchEnv) -> Optional[str]:
    count = restarts(env.launcher)
    if count > 0:
        found = find_good_checkpoint(work_dir, only_this_run=True)
        print_log(
            f'This is restart {count} of this job, '
            + ('which has saved nothing yet.' if found is None else f'resuming from {found}.'),
            'current',
        )
        if found is not None:
            return found
    else:
        write_text('', Path(work_dir) / STARTED)  # a restart ignores older files
    if not resume:
        left = newest_files([Path(work_dir)])
        if left and count == 0:
            log_warning(
                f'{work_dir} holds {len(left)} checkpoint(s) of an earlier run, {left[0].name} '
                f'the newest, and this run starts from the beginning. --resume goes on from '
                f'there; another --work-dir keeps them apart.'
            )
        return None
    if load_from is None:
        return find_good_checkpoint(work_dir)
    if os.path.isfile(load_from):
        check_file(load_from)
    elif re.match(r'\w+://', load_from) is None:
        raise CheckpointError(
            f'resume=True and load_from={load_from!r}: there is no such file. Correct the path, '
            f'or remove load_from to resume from the newest in {work_dir}.'
        )
    return load_from
