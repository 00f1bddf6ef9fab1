"""Pods: the variables of each operator, and what tells a pod's rank from that of a process."""

import os

import pytest

from mmdevplug.environments.base import Hosts
from mmdevplug.environments.kubernetes import Kubernetes
from mmdevplug.environments.launch_variables import (
    LAUNCHERS,
    LaunchEnv,
    environment_of,
    find_environment,
    read_launch_env,
)
from mmdevplug.errors import LaunchError

POD = dict(RANK='1', WORLD_SIZE='2', MASTER_ADDR='job-master-0', MASTER_PORT='23456')
JOINED = Hosts(2, 1, None, 'job-master-0', 23456)
VOLCANO = dict(
    VC_MASTER_HOSTS='job-master-0.job', VC_MASTER_NUM='1', VC_WORKER_NUM='2',
    VC_WORKER_HOSTS='job-worker-0.job,job-worker-1.job', VC_TASK_INDEX='0',
)  # fmt: skip


@pytest.mark.parametrize(
    ('environ', 'expected'),
    [
        (POD, JOINED),
        (dict(POD, PET_NPROC_PER_NODE='gpu'), JOINED._replace(nproc='gpu')),
        # Kubeflow counts processes.
        (
            dict(POD, WORLD_SIZE='8', PET_NNODES='2', PET_NODE_RANK='1', PET_NPROC_PER_NODE='4'),
            JOINED._replace(nproc=4),
        ),
        # Releases before 1.7 call the first pod localhost there.
        (
            dict(POD, RANK='0', MASTER_ADDR='localhost', PET_MASTER_ADDR='job-master-0'),
            JOINED._replace(node_rank=0),
        ),
        (dict(POD, MASTER_PORT=''), JOINED._replace(master_port=29500)),
        (dict(POD, RANK='0', WORLD_SIZE='1'), Hosts()),
        (dict(VOLCANO, HOSTNAME='job-master-0', **POD), JOINED),
        (dict(VC_TASK_INDEX='0', VC_WORKER_HOSTS='job-worker-0.job'), Hosts()),
    ],
)
def test_hosts(environ, expected):
    assert Kubernetes(environ).hosts() == expected


@pytest.mark.parametrize('name', ['LOCAL_RANK', 'GROUP_RANK', 'TORCHELASTIC_RUN_ID'])
def test_the_rank_of_a_process_is_not_that_of_a_pod(name):
    assert Kubernetes(dict(POD, **{name: '0'})).detect() == {}


@pytest.mark.parametrize('missing', ['RANK', 'WORLD_SIZE', 'MASTER_ADDR'])
def test_a_variable_that_a_pod_lacks_is_named(missing):
    environ = {name: value for name, value in POD.items() if name != missing}
    environ['KUBERNETES_SERVICE_HOST'] = '10.96.0.1'
    missing = {'WORLD_SIZE': 'PET_NNODES'}.get(missing, missing)
    for ask in (Kubernetes(environ).hosts, Kubernetes(environ).refuse_to_run_alone):
        with pytest.raises(LaunchError, match=missing):
            ask()


def test_one_process_in_each_pod_is_a_rank(monkeypatch):
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    env = read_launch_env('kubernetes')
    assert env == LaunchEnv('kubernetes', 1, 0, 2, 1, 'job-master-0', 23456)
    assert find_environment().node_rank() == 1
    # What it writes for torch.distributed does not change how it is read.
    env.export()
    assert os.environ['LOCAL_RANK'] == '0'
    assert read_launch_env('kubernetes') == env


@pytest.mark.parametrize(
    ('environ', 'told'),
    [
        ({}, 'but found neither'),
        (dict(POD, PET_NPROC_PER_NODE='2'), 'for one process in each pod, which'),
        (dict(PET_NNODES='1:2', PET_RDZV_BACKEND='c10d', PET_RDZV_ENDPOINT='a:1'), 'for one proc'),
    ],
)
def test_what_is_no_single_process_of_a_pod_is_refused(environ, told):
    with pytest.raises(LaunchError, match=told):
        read_launch_env('kubernetes', environ)


def test_every_launcher_answers_the_same_questions():
    place = dict(
        pytorch=dict(RANK='3', WORLD_SIZE='4', LOCAL_RANK='1', LOCAL_WORLD_SIZE='2',
                     GROUP_RANK='1', MASTER_ADDR='a'),
        mpi=dict(PMI_RANK='1', PMI_SIZE='2', MPI_LOCALRANKID='0', MPI_LOCALNRANKS='1',
                 MASTER_ADDR='a'),
        slurm=dict(SLURM_PROCID='3', SLURM_NTASKS='4', SLURM_LOCALID='1', SLURM_NODEID='1',
                   SLURM_TASKS_PER_NODE='2(x2)', MASTER_ADDR='a'),
        kubernetes=dict(POD, MASTER_ADDR='a'),
    )  # fmt: skip
    for kind in map(environment_of, LAUNCHERS):
        if kind.name == 'none':
            continue
        environment = kind(place[kind.name])
        env = environment.read()
        assert environment.node_rank() == 1
        assert env.master_addr == environment.read().master_addr == 'a'
        assert (env.rank, env.world_size) == (environment.rank(), environment.world_size())
        assert env.local_world_size == environment.local_world_size()
        assert env.world_size == 2 * env.local_world_size
