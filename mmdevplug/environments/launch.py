"""Find out which launcher started this process, and read what it says."""

import os
from typing import Dict, Mapping, Optional, Tuple, Type

from mmdevplug.errors import LaunchError

from .base import DEFAULT_PORT, Environment, Hosts, LaunchEnv
from .kubernetes import Kubernetes, refuse_to_run_alone
from .mpi import MPI
from .none import NoLauncher
from .slurm import Slurm
from .stale import stale_variables, unset_line
from .torchrun import Torchrun, runs_below_torchrun

__all__ = ['DEFAULT_PORT', 'Environment', 'Hosts', 'LaunchEnv', 'refuse_to_run_alone']

#: Recognized in this order: a launcher may itself run in a job of those after it.
ENVIRONMENTS: Tuple[Type[Environment], ...] = (Torchrun, MPI, Slurm, Kubernetes, NoLauncher)
LAUNCHERS = tuple(sorted((one.name for one in ENVIRONMENTS), key=lambda name: name != 'none'))


def find_environment(environ: Optional[Mapping[str, str]] = None) -> Environment:
    """Return the environment of the launcher that the variables tell of.

    Args:
        environ (Mapping, optional): Defaults to ``os.environ``.
    """
    found = (kind(environ) for kind in ENVIRONMENTS)
    return next((one for one in found if one.detect()), NoLauncher(environ))


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
    kind = next((one for one in ENVIRONMENTS if one.name == launcher), None)
    if kind is None:
        raise LaunchError(
            f'launcher={launcher!r} is unknown; expected one of {", ".join(LAUNCHERS)}. Pass '
            f'--launcher pytorch under torchrun, slurm under srun, mpi under mpirun, '
            f'kubernetes in a pod.'
        )
    return kind(environ).read(port)


def forget_stale_variables(launcher: str) -> Dict[str, str]:
    """Remove the stale variables from this process and return them.

    Raises:
        LaunchError: If torchrun is running this process as one of several, or the variables of a
            pod say that it is, but no launcher was named: each process would train alone and
            write the same files.
    """
    if launcher == 'none':
        refuse_to_run_alone()
    stale = stale_variables(launcher)
    size = os.environ.get('WORLD_SIZE', '1')
    if launcher == 'none' and size != '1' and 'LOCAL_RANK' in stale and runs_below_torchrun():
        raise LaunchError(
            f"launcher='none', but torchrun runs this process as one of WORLD_SIZE={size}; each "
            f'of them would train alone. Pass --launcher pytorch, or for a single process: '
            f'{unset_line(stale)}'
        )
    for name in stale:
        del os.environ[name]
    return stale


def read_local_rank() -> int:
    """Read the local rank that a launcher or MMEngine wrote into the environment."""
    return Torchrun().local_rank()


def restart_count(environ: Optional[Mapping[str, str]] = None) -> int:
    """How often torchrun has restarted this job's workers; 0 without torchrun."""
    return Torchrun(environ).restarts()


def most_ranks(launcher: str, environ: Optional[Mapping[str, str]] = None) -> Optional[int]:
    """How many ranks an elastic job has when all hosts have joined; None if it is not one."""
    return Torchrun(environ).most_ranks() if launcher == 'pytorch' else None


def restarts(launcher: str, environ: Optional[Mapping[str, str]] = None) -> int:
    """How often this job was started again, by torchrun or by Slurm."""
    if launcher not in ('pytorch', 'slurm'):
        return 0
    count = restart_count(environ) if launcher == 'pytorch' else 0
    return count + Slurm(environ).number('SLURM_RESTART_COUNT', default=0)
