"""Read and check the launch variables, and fill in those that a launcher leaves out."""

import os
import re
import shutil
import socket
import subprocess
from typing import Any, Mapping, NamedTuple, Optional

import psutil

from mmdevplug.config.fields import REQUIRED, shortened
from mmdevplug.errors import LaunchError

from .loopback import LOOPBACK
from .stale import stale_variables

LAUNCHERS = ('none', 'pytorch', 'slurm', 'mpi')
DEFAULT_PORT = 29500  # torch.distributed's own


class LaunchEnv(NamedTuple):
    """How this process was started."""

    launcher: str = 'none'  # one of LAUNCHERS
    rank: int = 0  # of this process among all, 0 to world_size - 1
    local_rank: int = 0  # among those of its host
    world_size: int = 1  # number of processes
    local_world_size: Optional[int] = 1  # number of processes on this host, where known
    master_addr: str = '127.0.0.1'  # host name or address of rank 0
    master_port: int = DEFAULT_PORT

    @property
    def single_host(self) -> bool:
        """Whether all processes are known to run on this host."""
        return self.local_world_size == self.world_size

    def describe(self) -> str:
        """Name this process for a message."""
        return f'rank {self.rank} of {self.world_size} on host {socket.gethostname()}'

    def export(self) -> None:
        """Write the variables that MMEngine and torch.distributed read, and drop stale ones."""
        for name in stale_variables(self.launcher):
            # With TORCHELASTIC_USE_AGENT_STORE of an ended job no rank would hold the store.
            del os.environ[name]
        if self.local_world_size is not None:
            os.environ['LOCAL_WORLD_SIZE'] = str(self.local_world_size)
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.local_rank),
            WORLD_SIZE=str(self.world_size),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
        )


def read_launch_env(
    launcher: str, environ: Optional[Mapping[str, str]] = None, port: Optional[int] = None
) -> LaunchEnv:
    """Read the variables of a launcher and check that they agree.

    Args:
        launcher (str): ``'pytorch'`` (torchrun), ``'slurm'``, ``'mpi'`` (Open MPI) or ``'none'``.
        environ (Mapping, optional): Defaults to ``os.environ``.
        port (int, optional): The master's port, instead of ``MASTER_PORT``. Defaults to None.
    """
    environ = os.environ if environ is None else environ
    if launcher == 'none':
        return LaunchEnv()
    if launcher not in LAUNCHERS:
        raise LaunchError(
            f'launcher={launcher!r} is unknown; expected one of {", ".join(LAUNCHERS)}. Pass '
            f'--launcher pytorch under torchrun, slurm under srun, mpi under mpirun.'
        )
    env = _read_slurm(environ) if launcher == 'slurm' else _read_named(launcher, environ)
    if port is not None:
        env = env._replace(master_port=_check_port(port, 'env_cfg.dist_cfg.port'))
    _check(env)
    return env


def _number(environ: Mapping[str, str], name: str, launcher: str, default: Any = REQUIRED) -> Any:
    value = environ.get(name)
    if value is None:
        if default is not REQUIRED:
            return default
        raise LaunchError(
            f'{name} is not set, but launcher={launcher!r} expects a number there. Start the job '
            f'with {_HOW_TO_START[launcher]}, or pass --launcher none for a single process.'
        )
    digits = value.strip()
    # PyTorch counts ranks in 32 bits, and Python refuses to read thousands of digits.
    if re.fullmatch('[0-9]{1,10}', digits) is None or int(digits) > _MOST:
        raise LaunchError(
            f'{name}={shortened(value)}: expected a number of 0 or more. It is set by '
            f'{_HOW_TO_START[launcher]}; unset a value left over from another job: unset {name}'
        )
    return int(digits)


_MOST = 2**31 - 1
_HOW_TO_START = {
    'pytorch': 'torchrun (tools/dist_train.sh)',
    'slurm': 'srun (tools/slurm_train.sh)',
    'mpi': 'mpirun',
}


def _port(environ: Mapping[str, str], launcher: str, default: int = DEFAULT_PORT) -> int:
    return _check_port(_number(environ, 'MASTER_PORT', launcher, default), 'MASTER_PORT')


def _check_port(port: Any, origin: str) -> int:
    if re.fullmatch('[0-9]{1,5}', str(port)) is None or not 0 < int(port) < 65536:
        raise LaunchError(
            f'{origin}={shortened(port)}: expected a port from 1 to 65535. Set {origin} to a free '
            f'one.'
        )
    return int(port)


def _address(environ: Mapping[str, str], launcher: str) -> str:
    address = environ.get('MASTER_ADDR', '').strip()
    if not address:
        raise LaunchError(
            f'MASTER_ADDR is not set, but launcher={launcher!r} needs the address of rank 0. Set '
            f'it on every rank, e.g. MASTER_ADDR=127.0.0.1 on a single host.'
        )
    return address


#: The variables of each launcher that hold rank, world size, local rank and local world size.
_NAMES = {
    'pytorch': ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'),
    'slurm': ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID', 'SLURM_TASKS_PER_NODE'),
    'mpi': tuple(
        f'OMPI_COMM_WORLD_{part}' for part in ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE')
    ),
}


def _read_named(launcher: str, environ: Mapping[str, str]) -> LaunchEnv:
    """Read the variables of a launcher that has one for each number."""
    rank, world_size, local_rank, local_world_size = _NAMES[launcher]
    env = LaunchEnv(
        launcher,
        rank=_number(environ, rank, launcher),
        local_rank=_number(environ, local_rank, launcher),
        world_size=_number(environ, world_size, launcher),
        local_world_size=_number(environ, local_world_size, launcher, default=None),
        master_port=_port(environ, launcher),
    )
    found = _mpirun_address(environ, env) if launcher == 'mpi' else None
    return env._replace(master_addr=found or _address(environ, launcher))


def _mpirun_address(environ: Mapping[str, str], env: LaunchEnv) -> Optional[str]:
    """The address of rank 0 if mpirun tells enough and MASTER_ADDR is not set, else None."""
    if environ.get('MASTER_ADDR', '').strip():
        return None
    if env.single_host:
        return LOOPBACK
    # Open MPI 4 and earlier tell where mpirun itself runs: '8.0;tcp://10.0.0.1,172.17.0.1:37581'.
    uri = environ.get('OMPI_MCA_orte_hnp_uri', '')
    found = re.search(r'tcp://([^,:;]+)', uri)
    if found is None:
        return None
    here = [a.address for each in psutil.net_if_addrs().values() for a in each]
    if env.rank == 0 and found.group(1) not in here:
        raise LaunchError(
            f'OMPI_MCA_orte_hnp_uri={shortened(uri)}: mpirun runs on {found.group(1)}, but rank 0 '
            f'on {socket.gethostname()}, where the other ranks cannot find it. Put the host of '
            f'mpirun first into the host file, or name that of rank 0: mpirun -x '
            f'MASTER_ADDR=<host> ...'
        )
    return found.group(1)


def _read_slurm(environ: Mapping[str, str]) -> LaunchEnv:
    rank = _number(environ, 'SLURM_PROCID', 'slurm')
    world_size = _number(environ, 'SLURM_NTASKS', 'slurm')
    local_world_size = _slurm_local_world_size(environ, world_size)
    # Some installations leave SLURM_LOCALID out; tasks are then dealt out host by host.
    default = rank % local_world_size if local_world_size else REQUIRED
    return LaunchEnv(
        launcher='slurm',
        rank=rank,
        local_rank=_number(environ, 'SLURM_LOCALID', 'slurm', default=default),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=environ.get('MASTER_ADDR', '').strip()
        or (LOOPBACK if local_world_size == world_size else slurm_first_host(environ)),
        master_port=_port(environ, 'slurm', slurm_port(environ)),
    )


def slurm_port(environ: Mapping[str, str]) -> int:
    """Derive a port from ``SLURM_JOB_ID`` that two jobs on one host are unlikely to share."""
    job = _number(environ, 'SLURM_JOB_ID', 'slurm', default=None)
    # Below the ports that systems hand out by themselves.
    return DEFAULT_PORT if job is None else 15000 + job % 15000


def _slurm_local_world_size(environ: Mapping[str, str], world_size: int) -> Optional[int]:
    if environ.get('SLURM_NNODES') == '1':
        return world_size
    # '4' or '4(x2)' when all hosts run as many tasks; other forms ('4,3') leave it unknown.
    per_host = re.fullmatch(
        r'([0-9]{1,9})(\(x[0-9]{1,9}\))?', environ.get('SLURM_TASKS_PER_NODE', '')
    )
    return int(per_host.group(1)) or None if per_host else None


def slurm_first_host(environ: Mapping[str, str]) -> str:
    """Find the host of rank 0 in ``SLURM_NODELIST``."""
    hosts = environ.get('SLURM_NODELIST')
    if not hosts:
        raise LaunchError(
            "neither MASTER_ADDR nor SLURM_NODELIST is set, but launcher='slurm' takes the "
            'address of rank 0 from them. Start the job with srun (tools/slurm_train.sh), or set '
            'MASTER_ADDR to the host of rank 0.'
        )
    if shutil.which('scontrol') is None:
        if re.fullmatch(r'[\w.-]+', hosts):
            return hosts  # a single name needs no expansion
        raise LaunchError(
            f'SLURM_NODELIST={hosts!r} has to be expanded with scontrol, which is not on PATH. '
            f'Set MASTER_ADDR to the host of rank 0.'
        )
    done = subprocess.run(['scontrol', 'show', 'hostname', hosts], capture_output=True)
    names = done.stdout.decode().split()
    if done.returncode or not names:
        raise LaunchError(
            f'`scontrol show hostname {hosts}` names no host: {done.stderr.decode().strip()}. '
            f'Set MASTER_ADDR to the host of rank 0.'
        )
    return names[0]


def _check(env: LaunchEnv) -> None:
    rank, world_size, local_rank, local_world_size = _NAMES[env.launcher]
    remedy = (
        f'These variables come from {_HOW_TO_START[env.launcher]}; a value left over from another '
        f'job contradicts them: unset {rank} {world_size} {local_rank} {local_world_size}, and '
        f'start again.'
    )
    address = env.master_addr
    if not address.isprintable() or ' ' in address or len(address) > 255:
        raise LaunchError(
            f'MASTER_ADDR={shortened(address)}: expected the name or the address of the host of '
            f'rank 0, e.g. MASTER_ADDR=127.0.0.1 on a single host. Correct it.'
        )
    if env.world_size < 1:
        raise LaunchError(f'{world_size}={env.world_size}: expected 1 or more. {remedy}')
    if env.rank >= env.world_size:
        raise LaunchError(
            f'{rank}={env.rank} and {world_size}={env.world_size} disagree: expected a rank from '
            f'0 to {env.world_size - 1}. {remedy}'
        )
    name, most = local_world_size, env.local_world_size
    if most is None:
        name, most = world_size, env.world_size
    if not 1 <= most <= env.world_size:
        raise LaunchError(
            f'{name}={most} and {world_size}={env.world_size} disagree: expected 1 to '
            f'{env.world_size} processes on this host. {remedy}'
        )
    if env.local_rank >= most:
        raise LaunchError(
            f'{local_rank}={env.local_rank} and {name}={most} disagree: expected a local rank '
            f'from 0 to {most - 1}. {remedy}'
        )


def read_local_rank() -> int:
    """Read the local rank that a launcher or MMEngine wrote into the environment."""
    return _number(os.environ, 'LOCAL_RANK', 'pytorch')


def restart_count(environ: Optional[Mapping[str, str]] = None) -> int:
    """How often torchrun has restarted this job's workers; 0 without torchrun."""
    environ = os.environ if environ is None else environ
    return _number(environ, 'TORCHELASTIC_RESTART_COUNT', 'pytorch', default=0)


def restarts(launcher: str, environ: Optional[Mapping[str, str]] = None) -> int:
    """How often this job was started again, by torchrun or by Slurm."""
    environ = os.environ if environ is None else environ
    if launcher not in ('pytorch', 'slurm'):
        return 0
    count = restart_count(environ) if launcher == 'pytorch' else 0
    return count + _number(environ, 'SLURM_RESTART_COUNT', 'slurm', default=0)
