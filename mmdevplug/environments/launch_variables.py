"""Find out which launcher started this process, and read what it says."""

import os
from importlib import import_module
from pathlib import Path
from typing import List, Mapping, Optional, Type

from mmdevplug.errors import LaunchError

from .base import DEFAULT_PORT, Environment, Hosts, LaunchEnv, format_variables
from .stale import RANK_VARIABLES, stale_variables, unset_line
from .torchrun import Torchrun

__all__ = ['DEFAULT_PORT', 'Environment', 'Hosts', 'LaunchEnv']

#: The module and the class of each launcher. They are recognized in this order, ``'none'`` last: a
#: launcher may itself run in a job of those after it.
_CLASSES = dict(
    none='none:NoLauncher',
    pytorch='torchrun:Torchrun',
    mpi='mpi:MPI',
    slurm='slurm:Slurm',
    kubernetes='kubernetes:Kubernetes',
)
LAUNCHERS = tuple(_CLASSES)


def environment_of(launcher: str) -> Type[Environment]:
    """Return the subclass of :class:`Environment` for a launcher."""
    module, _, name = _CLASSES[launcher].partition(':')
    return getattr(import_module(f'.{module}', __package__), name)


def find_environment(environ: Optional[Mapping[str, str]] = None) -> Environment:
    """Return the environment of the launcher that the variables tell of.

    Args:
        environ (Mapping, optional): Defaults to ``os.environ``.
    """
    for launcher in LAUNCHERS[1:]:
        found = environment_of(launcher)(environ)
        if found.detect():
            return found
    return environment_of('none')(environ)


def read_launch_env(
    launcher: str, environ: Optional[Mapping[str, str]] = None, port: Optional[int] = None
) -> LaunchEnv:
    """Read the variables of a launcher and check that they agree.

    Args:
        launcher (str): ``'pytorch'`` (torchrun), ``'slurm'``, ``'mpi'``, ``'kubernetes'`` or
            ``'none'``.
        environ (Mapping, optional): Defaults to ``os.environ``.
        port (int, optional): The master's port, instead of ``MASTER_PORT``. Defaults to None.
    """
    if launcher not in LAUNCHERS:
        raise LaunchError(
            f'launcher={launcher!r} is unknown; expected one of {", ".join(LAUNCHERS)}. Pass '
            f'--launcher pytorch under torchrun, slurm under srun, mpi under mpirun, '
            f'kubernetes in a pod.'
        )
    return environment_of(launcher)(environ).read(port)


def find_job(environ: Optional[Mapping[str, str]] = None) -> Optional[Environment]:
    """Return the launcher that started this process as one of several; None if none did."""
    found = find_environment(environ)
    size = '' if found.per_host else found.text(found.names[1])
    return None if size in ('', '1') else found


def refuse_to_stay_alone(starts: bool, environ: Optional[Mapping[str, str]] = None) -> None:
    """Refuse a process, or one that starts others here, where its job holds more than this."""
    for launcher in LAUNCHERS[1:]:
        environment_of(launcher)(environ).refuse_to_stay_alone(starts)


def refuse_to_run_alone(environ: Optional[Mapping[str, str]] = None) -> None:
    """Refuse a process for which no launcher was named if it is, or may be, one of several.

    Raises:
        LaunchError: With what says so, and the ways out: each process would train alone and write
            the same files.
    """
    environ = os.environ if environ is None else environ
    _refuse_to_run_alone(environ)
    job = find_job(environ)
    if job is not None:
        raise _one_of_several(job)
    found = {name: environ[name].strip() for name in RANK_VARIABLES if environ.get(name)}
    if len(found) == len(RANK_VARIABLES) and found['WORLD_SIZE'] != '1':
        raise LaunchError(
            f'{format_variables(found)} say that this process is one of '
            f'WORLD_SIZE={found["WORLD_SIZE"]}, but no launcher is named: it would train alone. '
            "To join the others: --launcher pytorch (in a script launcher='pytorch'). If they are "
            f'left over, or for a single process: {unset_line(stale_variables("none", environ))}'
        )


def _refuse_to_run_alone(environ: Mapping[str, str]) -> None:
    for launcher in LAUNCHERS[1:]:
        environment_of(launcher)(environ).refuse_to_run_alone()


def _one_of_several(job: Environment) -> LaunchError:
    of_torchrun = stale_variables('none', job.environ) if job.name == Torchrun.name else {}
    return LaunchError(
        f"launcher='none', but {job.describe_variables()} say that {job.command} runs this "
        f'process as one of {job.names[1]}={job.text(job.names[1])}; each of them would train '
        f"alone. Pass --launcher {job.name} (in a script launcher='{job.name}'), or for a single "
        'process: '
        f'{unset_line(of_torchrun or job.detect())}'
    )


def follow_job() -> LaunchEnv:
    """Read the place of this process in the job of the launcher that started it, if one did.

    Raises:
        LaunchError: If the process may be one of several, but no launcher is recognized.
    """
    job = find_job()
    if job is not None:
        return job.read()
    refuse_to_run_alone()
    return LaunchEnv()


def forget_stale_variables(launcher: str) -> None:
    """Remove the stale variables from this process.

    With the launcher ``'none'`` those of Slurm and MPI are removed, too: they tell of a job from
    which the user keeps this process apart.

    Raises:
        LaunchError: If torchrun is running this process as one of several, or the variables of a
            pod say that it is, but no launcher was named: each process would train alone and
            write the same files.
    """
    job = None
    if launcher == 'none':
        _refuse_to_run_alone(os.environ)
        job = find_job()
    if job is not None and job.name == Torchrun.name:
        raise _one_of_several(job)
    for name in {**stale_variables(launcher), **({} if job is None else job.detect())}:
        del os.environ[name]


def read_local_rank() -> int:
    """Read the local rank that a launcher or MMEngine wrote into the environment."""
    return Torchrun().local_rank()


def restart_count(environ: Optional[Mapping[str, str]] = None) -> int:
    """How often torchrun has restarted this job's workers; 0 without torchrun."""
    return Torchrun(environ).number('TORCHELASTIC_RESTART_COUNT', default=0)


def restarts(launcher: str, environ: Optional[Mapping[str, str]] = None) -> int:
    """How often this job was started again, by torchrun or by Slurm."""
    if launcher not in ('pytorch', 'slurm'):
        return 0
    count = restart_count(environ) if launcher == 'pytorch' else 0
    if 'SLURM_RESTART_COUNT' not in (os.environ if environ is None else environ):
        return count
    return count + environment_of('slurm')(environ).number('SLURM_RESTART_COUNT')


def names_of_launch(launcher: str, environ: Optional[Mapping[str, str]] = None) -> List[str]:
    """Names of this launch that a restart of it has, too; none without a launcher that restarts.

    A name may also be that of an earlier launch, such as an ``--rdzv_id`` that a script has fixed.
    """
    env = os.environ if environ is None else environ
    if launcher not in ('pytorch', 'slurm'):
        return []
    names = [f'slurm {env["SLURM_JOB_ID"]}'] if env.get('SLURM_JOB_ID') else []
    if launcher == 'pytorch':
        run_id = env.get('TORCHELASTIC_RUN_ID', 'none')
        names += [] if run_id == 'none' else [f'torchrun {run_id}']
        # .../RUN_ID_RANDOM/attempt_0/0/error.json, whose folder each torchrun makes for itself.
        note = Path(env.get('TORCHELASTIC_ERROR_FILE', ''))
        if len(note.parents) > 2 and note.parents[1].name.startswith('attempt_'):
            names.append(f'torchrun {note.parents[2].name}')
    return names
