"""Find the newest undamaged checkpoint, the same on all ranks, and load it safely."""

import os
import re
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Union

import torch
from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.runner import CheckpointLoader
from torch import Tensor, nn

from mmdevplug.accelerators.move_nested import to_device
from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.errors import CheckpointError
from mmdevplug.patches.torch_load import safe_loading
from mmdevplug.utils.annotations import AnyRunner, Checkpoint
from mmdevplug.utils.file_kinds import check_archive, describe_no_checkpoint
from mmdevplug.utils.logs import log_warning

from .job import Job, Origin, origin_of, read_index, read_job
from .shard_files import check_shards, shards_folder
from .writing import FINISHED, POINTER, SHARDS, PathLike, is_local

#: Where :func:`torch.load` puts tensors.
MapLocation = Union[None, str, torch.device, Callable, Dict[str, str]]


def read_checkpoint(
    filename: str, map_location: MapLocation = 'cpu', mapped: bool = False
) -> Checkpoint:
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
    filename: str, map_location: MapLocation, mapped: bool, model: nn.Module
) -> Checkpoint:
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

        check_shards(filename, checkpoint)
        attach_shards(checkpoint, shards_folder(filename, checkpoint), model)
    return checkpoint


# finding -----------------------------------------------------------------------------------------


def read_pointer(work_dir: PathLike) -> Optional[str]:
    """Read ``last_checkpoint``; None if there is no such file or nothing in it."""
    path = Path(work_dir) / POINTER
    if not path.is_file():
        return None
    return path.read_text(encoding='utf-8', errors='replace').strip() or None


def is_finished(work_dir: PathLike) -> bool:
    """Whether the last run in a folder has ended: its last checkpoint was noted then."""
    ended = Path(work_dir) / FINISHED
    return (
        ended.is_file() and bool(ended.read_text()) and ended.read_text() == read_pointer(work_dir)
    )


def check_file(path: PathLike) -> None:
    """Read all of a checkpoint and of its shards, and compare their checksums.

    Raises CheckpointError if the file is truncated or damaged, OSError if it cannot be read.
    """
    try:
        check_archive(path)
    except ValueError as error:
        raise CheckpointError(f'{path} is damaged: {error}') from error
    index = read_index(path)
    if index is None:
        with open(str(path), 'rb') as file:
            if file.read(2) == b'\x80\x02' and os.path.getsize(str(path)) > 1024:
                return  # written by a PyTorch before 1.6, without checksums
        kind = describe_no_checkpoint(path) or 'truncated or no checkpoint'
        raise CheckpointError(f'{path} is {kind}')
    if isinstance(index, dict) and SHARDS in index:
        check_shards(path, index)


def find_good_checkpoint(work_dir: PathLike, job: Optional[str] = None) -> Optional[str]:
    """Find the newest checkpoint that is whole, and log those that are not.

    Of the job that has written the file which ``last_checkpoint`` names, the one of the most
    iterations is the newest. The folder of that file is searched, too. Returns a path or an
    address, None if nothing was saved yet; raises CheckpointError if there are checkpoints and
    none is whole.

    Args:
        work_dir (str or Path): With ``last_checkpoint``.
        job (str, optional): Whose checkpoints count. Defaults to None: those of any job.
    """
    pointed = read_pointer(work_dir)
    if pointed is not None and re.match(r'\w+://', pointed):
        # An object store has whole objects or none.
        return pointed if job is None or read_job(work_dir).get('saved') == pointed else None
    candidates = _newest_first(_candidates(Path(work_dir), pointed), job)
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
        # A crash may have left a part of a path, whose folder is another one.
        whole = path.suffix == '.pth' and len(path.name) < 256
        if whole and not path.exists() and (work_dir / path.name).exists():
            path = work_dir / path.name  # the folder was moved
        if whole and path.exists():
            first = [path]
        else:
            log_warning(
                f'{work_dir / POINTER} names {pointed[:200]}, which does not exist. Looking for '
                f'others.'
            )
        folders = [path.parent, work_dir] if whole else folders
    # Best checkpoints hold no optimizer state.
    others = [one for one in newest_files(folders) if re.fullmatch(r'(?!best_).*\d', one.stem)]
    return first + [path for path in others if path not in first]


def _newest_first(candidates: Sequence[Path], job: Optional[str]) -> List[Path]:
    """Order checkpoints of one job by iterations, not by times of files, before all others.

    Args:
        candidates (list[Path]): The one that the pointer names, if any, then the others.
        job (str, optional): Whose they are to be; None: those of the first go first.
    """
    origins = {path: origin_of(path) for path in candidates}

    def newer_than(iteration: int) -> List[Path]:
        found = [path for path in candidates if origins[path].job == job]
        found = [path for path in found if origins[path].iteration > iteration]
        return sorted(found, key=lambda path: origins[path].iteration, reverse=True)

    if job is not None:
        return newer_than(-1)
    job, iteration = origins[candidates[0]] if candidates else Origin()
    newer = [] if job is None else newer_than(iteration)
    return newer + [path for path in candidates if path not in newer]


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

    If the config sets ``load_from`` but not ``resume``, the weights only initialize training, even
    if a script sets ``cfg.resume = True`` later.
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
    work_dir, env, job = runner.work_dir, runner.device_context.env, runner.job
    found = run_on_main(
        'finding the checkpoint to resume from', lambda: _find(work_dir, load_from, resume, job)
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


def _find(
    work_dir: str, load_from: Optional[str], resume: bool, job: Optional[Job]
) -> Optional[str]:
    if job is not None and job.restarts:
        found = find_good_checkpoint(work_dir, job.name)
        print_log(
            f'This is restart {job.restarts} of this job, '
            + ('which has saved nothing yet.' if found is None else f'resuming from {found}.'),
            'current',
        )
        if found is not None:
            return found
    if not resume:
        left = newest_files([Path(work_dir)])
        if left and job is not None and not job.restarts:
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
