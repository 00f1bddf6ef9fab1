"""Which launcher is found in hundreds of drawn environments, whole and damaged.

What several processes or pods were given never ends in one that trains alone, and never in an
error that is not ours. Nothing is started here: the decision is a function of the variables.
"""

import random
import re

import pytest

from mmdevplug.cli import hosts as hosts_module
from mmdevplug.cli.hosts import read_job, starts_processes
from mmdevplug.cli.train import build_parser
from mmdevplug.environments import torchrun
from mmdevplug.environments.launch_variables import read_launch_env, refuse_to_run_alone
from mmdevplug.errors import LaunchError
from tests.cli.test_launch_fuzz import AGENT, VALUES

CASES = 2000
ADDRESS = dict(MASTER_ADDR='10.0.0.1', MASTER_PORT='23456')
PET_ADDRESS = {f'PET_{name}': value for name, value in ADDRESS.items()}
ELASTIC = ['--nnodes', '1:4', '--nproc', '2', '--master-addr', 'host0']
#: What a shell keeps of a job of torchrun.
LEFT = dict(RANK='3', LOCAL_RANK='1', WORLD_SIZE='8', LOCAL_WORLD_SIZE='4', **ADDRESS, **AGENT)


def pod(**environ):
    return dict(environ, KUBERNETES_SERVICE_HOST='10.96.0.1')


def pytorch_job(hosts, index, nproc):
    """Kubeflow counts processes in WORLD_SIZE; RANK is the pod's."""
    return pod(
        RANK=str(index), WORLD_SIZE=str(hosts * nproc), PET_NNODES=str(hosts),
        PET_NODE_RANK=str(index), PET_NPROC_PER_NODE=str(nproc), **ADDRESS, **PET_ADDRESS,
    )  # fmt: skip


def train_job(hosts, index, nproc):
    names = dict(NNODES=hosts, NODE_RANK=index, NPROC_PER_NODE=nproc)
    return pod(**{f'PET_{name}': str(value) for name, value in names.items()}, **PET_ADDRESS)


def elastic_pytorch_job(hosts, index, nproc):
    """Kubeflow's, with an elasticPolicy: workers alone, which are numbered as they join."""
    return pod(
        PET_NNODES=f'1:{hosts + 1}', PET_NPROC_PER_NODE=str(nproc), PET_RDZV_BACKEND='c10d',
        PET_RDZV_ENDPOINT='job-worker-0:23456', PET_RDZV_ID='job', PET_MAX_RESTARTS='10',
    )  # fmt: skip


def pod_of_one_process(hosts, index, nproc):
    """Volcano's plugin for PyTorch, PAI-DLC, AIHC: pods alone are counted."""
    return pod(RANK=str(index), WORLD_SIZE=str(hosts), **ADDRESS)


def volcano(hosts, index, nproc):
    """Volcano without that plugin, which names hosts and not the pod's own."""
    names = [f'job-worker-{i}.job' for i in range(hosts)]
    return pod(
        VC_WORKER_HOSTS=','.join(names), VC_TASK_INDEX=str(index), HOSTNAME=names[index][:-4]
    )


def srun(hosts, index, nproc):
    tasks = dict(NTASKS=hosts * nproc, TASKS_PER_NODE=f'{nproc}(x{hosts})', NNODES=hosts)
    step = dict(NUM_TASKS=hosts * nproc, TASKS_PER_NODE=f'{nproc}(x{hosts})', NUM_NODES=hosts)
    own = dict(
        PROCID=index * nproc, LOCALID=0, NODEID=index, STEP_ID=0, JOB_ID=7, NODELIST='node1'
    )
    values = {**tasks, **{f'STEP_{name}': value for name, value in step.items()}, **own}
    return {f'SLURM_{name}': str(value) for name, value in values.items()}


def sbatch(hosts, index, nproc):
    names = dict(NTASKS=hosts * nproc, NNODES=hosts, PROCID=0, LOCALID=0, JOB_ID=7)
    return dict(
        {f'SLURM_{name}': str(value) for name, value in names.items()}, ENVIRONMENT='BATCH'
    )


def numbers(names, hosts, index, nproc):
    values = (index * nproc, hosts * nproc, 0, nproc)
    return dict(dict(zip(names, map(str, values))), **ADDRESS)


def open_mpi(*place):
    names = ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE')
    return numbers([f'OMPI_COMM_WORLD_{name}' for name in names], *place)


def hydra(*place):
    return numbers(('PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'), *place)


def below_torchrun(*place):
    found = numbers(('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'), *place)
    return dict(found, **AGENT)


PER_HOST = (pytorch_job, elastic_pytorch_job, train_job, pod_of_one_process, volcano)
PER_PROCESS = (srun, open_mpi, hydra, below_torchrun)
#: Have variables of the names of torchrun's, of which a shell can hold one value alone.
SAME_NAMES = (below_torchrun, pytorch_job, pod_of_one_process)
NAMES = {srun: 'slurm', open_mpi: 'mpi', hydra: 'mpi', below_torchrun: 'pytorch'}


def draw(number):
    """A whole environment: the scheduler, how it calls this process, and what it is to become."""
    chance = random.Random(number)
    scheduler = chance.choice((*PER_HOST, *PER_PROCESS, sbatch))
    hosts = chance.choice((1, 2, 2, 3))
    index = chance.randrange(hosts)
    nproc = 1 if scheduler in (pod_of_one_process, volcano) else chance.choice((1, 2, 4))
    environ = scheduler(hosts, index, nproc)
    flags = chance.choice(([], [], [], [], ['--nproc', '2'], ELASTIC))
    if flags == ELASTIC:
        # These say all: what variables tell of hosts is left aside, but not of processes here.
        started = scheduler in PER_PROCESS and nproc > 1
        expected = ('refused',) if started else ('starts', '1:4', None, 2, 'host0')
    elif scheduler is elastic_pytorch_job:
        nproc = 2 if flags else nproc
        expected = ('starts', f'1:{hosts + 1}', None, nproc, 'job-worker-0')
    elif scheduler is volcano:
        expected = ('refused',) if hosts > 1 else ('starts', 1, 0, 2) if flags else ('alone',)
    elif scheduler in PER_HOST:
        several = ('starts', hosts, index, 2 if flags else nproc)
        expected = several if flags or hosts * nproc > 1 else ('alone',)
    elif scheduler is sbatch:
        expected = ('starts', 1, 0, 2) if flags else ('alone',)
        if (hosts if flags else hosts * nproc) > 1:
            expected = ('refused',)
    elif flags:
        expected = ('refused',)
        if hosts * nproc == 1 or (nproc == 1 and scheduler is not below_torchrun):
            expected = ('starts', hosts, index, 2)
    else:
        expected = ('rank', NAMES[scheduler], index * nproc, hosts * nproc)
        if hosts * nproc == 1 and scheduler is not below_torchrun:
            expected = ('alone',)
    if chance.random() < 0.3 and scheduler not in SAME_NAMES:
        environ = {**LEFT, **environ}
        if scheduler in (srun, volcano, sbatch):
            del environ['MASTER_ADDR'], environ['MASTER_PORT']
        elif expected == ('alone',):
            expected = ('refused',)  # a whole set of variables of one of several
    elif chance.random() < 0.3 and scheduler in (open_mpi, hydra, below_torchrun):
        around = chance.choice((sbatch(2, 0, 2), train_job(2, 1, 4)))
        environ.update(around)
        if expected == ('alone',) and 'PET_NNODES' in around:
            expected = ('refused',)  # mpirun for one process, in one of two pods
    return dict(scheduler=scheduler, environ=environ, flags=flags, expected=expected)


def damage(case, number):
    """Leave out or change up to two of the variables; return which."""
    chance = random.Random(-number)
    environ = dict(case['environ'])
    names = chance.sample(sorted(environ), min(len(environ), chance.choice((1, 1, 2))))
    for name in names:
        if chance.random() < 0.4:
            del environ[name]
        else:
            environ[name] = chance.choice(VALUES)
    return dict(case, environ=environ), names


def decide(case):
    """What ``mmdevplug train`` does: its kind, and where it puts this process."""
    environ = case['environ']
    args = build_parser().parse_args(['config.py', *case['flags']])
    try:
        if starts_processes(args, environ):
            found = read_job(args, environ)
            place = (found.node_rank, found.nproc, found.master_addr)
            if not found.elastic:
                place = (found.node_rank or 0, found.nproc)
            return ('starts', found.nnodes, *place)
        if args.launcher == 'none':
            refuse_to_run_alone(environ)
            return ('alone',)
        env = read_launch_env(args.launcher, environ)
        return ('rank', args.launcher, env.rank, env.world_size)
    except LaunchError as error:
        return ('refused', str(error))


@pytest.fixture
def processes(monkeypatch):
    """Let a case say whether torchrun started its process; no program of this machine helps."""
    monkeypatch.setenv('PATH', '')
    below = []
    monkeypatch.setattr(torchrun, 'runs_below_torchrun', lambda: below[-1])
    monkeypatch.setattr(hosts_module, 'say', lambda text: None)
    return below


def test_whole_environments_are_read_as_they_are_meant(processes):
    seen = {}
    for number in range(CASES // 2):
        case = draw(number)
        processes.append(case['scheduler'] is below_torchrun)
        found = decide(case)
        assert found[: len(case['expected'])] == case['expected'], (number, case, found)
        kind = (case['scheduler'].__name__, found[0])
        seen[kind] = seen.get(kind, 0) + 1
    assert len(seen) > 15, seen


def test_damaged_environments_never_train_alone(processes):
    kinds = {}
    for number in range(CASES // 2):
        case, names = damage(draw(number), number)
        processes.append(case['scheduler'] is below_torchrun)
        found = decide(case)
        kinds[found[0]] = kinds.get(found[0], 0) + 1
        kind, *hosts = case['expected']
        several = kind in ('rank', 'refused') or hosts[:1] not in ([], [1])
        # Variables that consistently say one are believed.
        ones = any(case['environ'].get(name, '').strip() in ('', '0', '1') for name in names)
        lists = any(name.endswith('_HOSTS') for name in names)
        if several and not (ones or lists):
            assert found[0] != 'alone', (number, names, case, found)
        if found[0] == 'refused':
            assert set(re.findall(r'[A-Z]+(?:_[A-Z]+)+|RANK', found[1])), found
            assert len(found[1]) < 4000
    assert min(kinds.get(kind, 0) for kind in ('refused', 'rank', 'starts', 'alone')) > 20, kinds
