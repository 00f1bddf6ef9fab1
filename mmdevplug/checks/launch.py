"""Section *launch*: launch variables, contradictions between them, leftovers of an old job."""

import os
from typing import Any, Iterator, List, Mapping, Optional

from mmdevplug.environments.launch_variables import Environment, find_environment, read_launch_env
from mmdevplug.environments.stale import stale_variables, unset_line
from mmdevplug.errors import LaunchError

from .findings import Finding, Section

section = Section('launch')

#: Variables whose values are printed; others may hold secrets.
SHOWN = (
    *('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'),
    *('GROUP_RANK', 'ROLE_RANK', 'ROLE_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'),
    *('TORCHELASTIC_RUN_ID', 'TORCHELASTIC_RESTART_COUNT'),
    *('TORCHELASTIC_MAX_RESTARTS', 'TORCHELASTIC_USE_AGENT_STORE'),
    *('SLURM_JOB_ID', 'SLURM_PROCID', 'SLURM_LOCALID', 'SLURM_NTASKS', 'SLURM_NNODES'),
    *('SLURM_TASKS_PER_NODE', 'SLURM_NODELIST', 'SLURM_STEP_NUM_TASKS'),
    *('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'),
    *('OMPI_COMM_WORLD_LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_SIZE'),
    *('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'),
    *('PET_NNODES', 'PET_NODE_RANK', 'PET_NPROC_PER_NODE', 'PET_MASTER_ADDR', 'PET_MASTER_PORT'),
    *('MMDEVPLUG_ACCELERATOR', 'PJRT_DEVICE', 'CUDA_VISIBLE_DEVICES'),
    *('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME', 'OMP_NUM_THREADS'),
)


def examine(environ: Optional[Mapping[str, str]] = None) -> List[Finding]:
    """Examine the variables; by default those of this process."""
    environ = os.environ if environ is None else environ
    shown = [f'{name}={environ[name]}' for name in SHOWN if name in environ]
    findings = [section.note(f'set: {" ".join(shown)}')] if shown else []
    environment = find_environment(environ)
    if not environment.per_host:  # There they are of the pod.
        findings += _stale(environ)
    if environment.name != 'none':
        findings += _under(environment)
    if not any(finding.level in ('error', 'warning') for finding in findings):
        findings.append(section.ok('no launch variable contradicts another'))
    return findings


def _stale(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report what an earlier job left in a shell that starts single processes."""
    stale = stale_variables('none', environ)
    if not stale:
        return
    named = ' '.join(f'{name}={value}' if name in SHOWN else name for name, value in stale.items())
    problem = ''
    try:
        read_launch_env('pytorch', environ)
    except LaunchError as error:
        problem = f'. For torchrun they are wrong, too: {error}'
    yield section.warning(
        f'left over from an earlier job: {named}{problem}',
        'scripts that read them take a single process for one of several, and wait for the others '
        'without end.',
        unset_line(stale),
    )


def _under(environment: Environment) -> Iterator[Finding]:
    name = environment.name
    try:
        hosts = environment.hosts() if environment.per_host else None
        env: Any = environment.read() if hosts is None else None
    except LaunchError as error:
        yield section.error(
            f'--launcher {name} is refused here: {error}',
            'every process of the job would be refused.',
            f'unset {" ".join(environment.detect())}',
        )
        return
    if hosts is not None:
        place = '' if hosts.node_rank is None else f' as number {hosts.node_rank}'
        meet = '' if hosts.master_addr is None else f', which meet at {hosts.master_addr}'
        yield section.ok(
            f'mmdevplug train joins a job of {hosts.nnodes} pod(s){place}{meet}, with '
            f'{hosts.nproc or "--nproc"} process(es) in each'
        )
        return
    yield section.ok(
        f'--launcher {name}: {env.describe()}, MASTER_ADDR={env.master_addr} '
        f'MASTER_PORT={env.master_port}'
    )
    if env.world_size > 1:
        yield section.note(
            f'this shell is one of {env.world_size} tasks of {name}',
            "mmdevplug train joins them by itself; in a repository's own script each task trains "
            'alone unless --launcher is passed.',
            f'python tools/train.py CONFIG --launcher {name}',
        )
