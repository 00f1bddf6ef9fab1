"""The variables of Slurm, for each task of srun."""

import re
import shutil
import subprocess
from typing import Dict, Mapping, Optional

from mmdevplug.config.fields import REQUIRED, shortened
from mmdevplug.errors import LaunchError

from .base import DEFAULT_PORT, Environment
from .loopback import LOOPBACK

_WORDS = dict(SLURM_NTASKS='tasks', SLURM_NNODES='hosts')


class Slurm(Environment):
    """srun; a part of a job may have fewer hosts and tasks than the job, so its own count."""

    name = 'slurm'
    command = 'srun (tools/slurm_train.sh)'

    def __init__(self, environ: Optional[Mapping[str, str]] = None) -> None:
        super().__init__(environ)
        tasks = self._name('SLURM_STEP_NUM_TASKS', 'SLURM_NTASKS')
        per_host = self._name('SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE')
        self.names = ('SLURM_PROCID', tasks, 'SLURM_LOCALID', per_host)

    def _name(self, of_step: str, of_job: str) -> str:
        return of_step if of_step in self.environ else of_job

    def detect(self) -> Dict[str, str]:
        """Recognize a task of srun: a batch script has a task's variables, too."""
        there = [name in self.environ for name in self.names[:2]]
        in_step = 'SLURM_STEP_ID' in self.environ
        if not (any(there) if in_step else all(there)):
            return {}
        if not in_step and self.environ.get('ENVIRONMENT') == 'BATCH':
            return {}
        names = (*self.names, 'SLURM_JOB_ID', 'SLURM_STEP_ID', 'MASTER_ADDR', 'MASTER_PORT')
        return {name: self.environ[name] for name in names if name in self.environ}

    def local_rank(self) -> int:
        """Read the local rank; some installations leave it out and deal tasks host by host."""
        per_host = self.local_world_size()
        return self.number('SLURM_LOCALID', self.rank() % per_host if per_host else REQUIRED)

    def local_world_size(self) -> Optional[int]:
        """Read the number of tasks on this host, None where hosts differ."""
        if self.environ.get(self._name('SLURM_STEP_NUM_NODES', 'SLURM_NNODES')) == '1':
            return self.world_size()
        # '4' or '4(x2)' when all hosts run as many tasks; other forms ('4,3') leave it unknown.
        per_host = re.fullmatch(
            r'([0-9]{1,9})(\(x[0-9]{1,9}\))?', self.environ.get(self.names[3], '')
        )
        return int(per_host.group(1)) or None if per_host else None

    def node_rank(self) -> Optional[int]:
        """Read the index of this host."""
        return self.number('SLURM_NODEID', default=None)

    def master_addr(self) -> str:
        """Read ``MASTER_ADDR``, or else find the first host."""
        given = self.text('MASTER_ADDR')
        if given:
            return given
        if self.local_world_size() == self.world_size():
            return LOOPBACK
        return first_host(self.environ)

    def master_port(self) -> int:
        """Read ``MASTER_PORT``, or else derive a port that two jobs are unlikely to share."""
        return super().master_port() if 'MASTER_PORT' in self.environ else job_port(self.environ)

    def refuse_to_stay_alone(self, starts: bool) -> None:
        """Refuse a batch script or a shell to leave tasks, or hosts, of its job unused."""
        # Without --ntasks Slurm counts hosts alone.
        names = ('SLURM_NNODES',) if starts else ('SLURM_NTASKS', 'SLURM_NNODES')
        found, name = max((self.number(name) if self.text(name) else 1, name) for name in names)
        if found < 2 or self.detect():
            return
        if starts:
            way = 'srun --ntasks-per-node=1 mmdevplug train CONFIG --nproc N ...; or for this host'
            way += ' alone give --nnodes 1'
        else:
            way = 'srun mmdevplug train CONFIG ...; or for one process alone give --launcher none'
        raise LaunchError(
            f'{name}={found}: Slurm holds {found} {_WORDS[name]} for this job, but this '
            f'process was started outside of srun and would train alone. Start it as: '
            f'{way}.'
        )


def job_port(environ: Mapping[str, str]) -> int:
    """Derive a port from ``SLURM_JOB_ID`` that two jobs on one host are unlikely to share."""
    job = Slurm(environ).number('SLURM_JOB_ID', default=None)
    # Below the ports that systems hand out by themselves.
    return DEFAULT_PORT if job is None else 15000 + job % 15000


def first_host(environ: Mapping[str, str]) -> str:
    """Find the host of rank 0 in the list of hosts of the tasks, or else of the job."""
    names = ('SLURM_STEP_NODELIST', 'SLURM_NODELIST', 'SLURM_JOB_NODELIST')
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        raise LaunchError(
            "neither MASTER_ADDR nor SLURM_NODELIST is set, but launcher='slurm' takes the "
            'address of rank 0 from them. Start the job with srun (tools/slurm_train.sh), or set '
            'MASTER_ADDR to the host of rank 0.'
        )
    hosts = environ[name]
    if re.fullmatch(r'[\w.-]+', hosts):
        return hosts  # a single name needs no expansion
    if shutil.which('scontrol') is None:
        raise LaunchError(
            f'{name}={shortened(hosts)} has to be expanded with scontrol, which is not on PATH. '
            f'Set MASTER_ADDR to the host of rank 0.'
        )
    done = subprocess.run(['scontrol', 'show', 'hostname', hosts], capture_output=True)
    found = done.stdout.decode().split()
    if done.returncode or not found:
        raise LaunchError(
            f'`scontrol show hostname {hosts}` names no host: {done.stderr.decode().strip()}. '
            f'Set MASTER_ADDR to the host of rank 0.'
        )
    return found[0]
