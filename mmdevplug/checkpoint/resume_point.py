"""Decide which checkpoint a job resumes from, for all ranks alike."""

import os
import re
from typing import Optional

from mmengine.logging import print_log

from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.environments.launch import LaunchEnv, restarts
from mmdevplug.errors import CheckpointError

from .finding import check_file, find_good_checkpoint, mark_start
from .writing import is_local


def find_resume_point(
    work_dir: str, load_from: Optional[str], resume: bool, env: LaunchEnv
) -> Optional[str]:
    """Find the checkpoint to resume from on rank 0; None if training does not resume.

    A job that torchrun or Slurm has restarted resumes without being asked to.

    Raises:
        CheckpointError: If no checkpoint is whole, or this rank cannot see rank 0's.
    """
    found = run_on_main(
        'finding the checkpoint to resume from', lambda: _find(work_dir, load_from, resume, env)
    )
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
        mark_start(work_dir)
    if not resume:
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
