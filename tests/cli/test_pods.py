"""Pods and tasks of Slurm: what ``mmdevplug train`` starts there, and what it refuses."""

from types import SimpleNamespace

import pytest

from mmdevplug.accelerators import counting
from mmdevplug.cli import launch, train
from mmdevplug.errors import LaunchError
from tests.cli.running import CONFIG

POD = dict(RANK='1', WORLD_SIZE='2', MASTER_ADDR='job-master-0', MASTER_PORT='23456')


def set_variables(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


KUBEFLOW = dict(PET_NNODES='2', PET_NODE_RANK='1', PET_MASTER_ADDR='job-master-0')
KUBEFLOW['PET_MASTER_PORT'] = '23456'


@pytest.mark.parametrize(
    ('environ', 'flags', 'nproc'),
    [
        (POD, [], '1'),
        (POD, ['--nproc', '3'], '3'),
        (dict(POD, PET_NPROC_PER_NODE='4'), [], '4'),
        (dict(KUBEFLOW, PET_NPROC_PER_NODE='4'), [], '4'),
        (dict(KUBEFLOW, PET_NPROC_PER_NODE='4'), ['--nproc', '2'], '2'),
        (dict(KUBEFLOW, PET_NPROC_PER_NODE='auto'), [], '7'),
        (dict(KUBEFLOW, **dict(POD, WORLD_SIZE='8'), PET_NPROC_PER_NODE='4'), [], '4'),
    ],
)
def test_a_pod_joins_the_others(monkeypatch, capsys, started, environ, flags, nproc):
    set_variables(monkeypatch, environ)
    train.main([CONFIG, *flags])
    assert started.told == (int(nproc), 2, 2, 0, 'static', 'job-master-0:23456', 1)
    assert started.argv[-2:] == ['--launcher', 'pytorch']
    (line,) = [one for one in capsys.readouterr().err.splitlines() if 'core(s)' not in one]
    assert line.startswith("mmdevplug: launcher 'kubernetes', found by ")
    assert 'host 1 of 2' in line
    assert 'meet at job-master-0:23456' in line


def test_pods_that_come_and_go_meet_as_torchrun_would(monkeypatch, started):
    environ = dict(PET_NNODES='1:3', PET_RDZV_BACKEND='c10d', PET_RDZV_ENDPOINT='job-worker-0:23')
    set_variables(monkeypatch, dict(environ, PET_RDZV_ID='job', PET_MAX_RESTARTS='10'))
    train.main([CONFIG])
    assert started.told == (1, 1, 3, 10, 'c10d', 'job-worker-0:23', None)
    assert started.configs[-1].run_id == 'job'


@pytest.mark.parametrize(
    ('environ', 'flags', 'told'),
    [
        (POD, ['--launcher', 'none'], 'it would train alone. To join the others'),
        (POD, ['--nproc', '2', '--nnodes', '1'], 'nnodes=1 and RANK=1 WORLD_SIZE=2 MASTER_ADDR='),
        (POD, ['--nproc', '2', '--node-rank', '0'], 'node_rank=0 and RANK=1 WORLD_SIZE=2'),
        (dict(PET_NODE_RANK='1'), ['--nproc', '2'], 'expected PET_NNODES to be the number of'),
        (dict(PET_NODE_RANK='1'), [], 'expected PET_NNODES to be the number of pods'),
        (dict(POD, RANK='2'), [], 'expected RANK to be 0 to 1, another in each of 2 pods'),
        (dict(POD, RANK=''), [], 'expected RANK to be 0 to 1, another in each of 2 pods'),
        (dict(POD, PET_NODE_RANK='0'), [], 'expected RANK to be 0 to 1, another in each'),
        (dict(RANK='1', KUBERNETES_SERVICE_HOST='a'), [], 'expected PET_NNODES to be the number'),
        (dict(POD, WORLD_SIZE='x'), [], 'expected WORLD_SIZE to be the number of pods'),
        (dict(POD, MASTER_PORT='0'), [], "MASTER_PORT='0': expected a port from 1 to 65535"),
        (dict(POD, LOCAL_RANK='0'), [], 'To join the others: --launcher pytorch'),
        (dict(PET_NNODES='2'), [], 'expected PET_NODE_RANK to be 0 to 1, another in each'),
        (dict(VC_WORKER_HOSTS='a.job,b.job'), [], "Volcano's plugin `pytorch` sets"),
    ],
)
def test_a_pod_does_not_train_alone(monkeypatch, environ, flags, told):
    monkeypatch.setattr(launch, '_start_server', None)
    set_variables(monkeypatch, environ)
    with pytest.raises(LaunchError) as caught:
        train.main([CONFIG, *flags])
    assert told in str(caught.value)
    assert 'unset ' in str(caught.value) or 'Set MASTER_PORT' in str(caught.value)


def test_all_flags_win_over_the_variables_of_a_pod(monkeypatch, started):
    set_variables(monkeypatch, dict(POD, PET_NNODES='5', PET_NODE_RANK='4'))
    flags = ['--nproc', '3', '--nnodes', '2', '--node-rank', '0', '--master-addr', 'elsewhere']
    train.main([CONFIG, *flags])
    assert started.told == (3, 2, 2, 0, 'static', 'elsewhere:29500', 0)


def test_the_only_pod_of_a_job_starts_its_processes(monkeypatch, started):
    environ = dict(POD, RANK='0', WORLD_SIZE='4', PET_NNODES='1', PET_NODE_RANK='0')
    set_variables(monkeypatch, dict(environ, PET_NPROC_PER_NODE='4'))
    train.main([CONFIG])
    assert started.told[:5] == (4, 1, 1, 0, 'static')
    assert started.told[5].startswith('127.0.0.1:')


def test_one_task_on_each_host_starts_the_processes_of_its_host(monkeypatch, capsys, started):
    environ = dict(PROCID='1', LOCALID='0', NTASKS='2', TASKS_PER_NODE='1(x2)', JOB_ID='77')
    set_variables(monkeypatch, {f'SLURM_{name}': value for name, value in environ.items()})
    monkeypatch.setenv('MASTER_ADDR', 'node3')
    train.main([CONFIG, '--nproc', '8'])
    assert started.told == (8, 2, 2, 0, 'static', 'node3:15077', 1)
    assert 'SLURM_STEP' not in capsys.readouterr().err
    monkeypatch.setenv('SLURM_TASKS_PER_NODE', '2')
    with pytest.raises(LaunchError, match='--nproc starts processes, but SLURM_PROCID=1'):
        train.main([CONFIG, '--nproc', '8'])


@pytest.mark.parametrize(
    ('name', 'flags', 'told'),
    [
        ('SLURM_NTASKS', [], 'srun mmdevplug train CONFIG ...; or for one process alone give'),
        ('SLURM_NNODES', ['--nproc', '2'], 'srun --ntasks-per-node=1 mmdevplug train CONFIG --n'),
    ],
)
def test_a_batch_script_leaves_no_tasks_unused(monkeypatch, started, name, flags, told):
    set_variables(monkeypatch, dict(ENVIRONMENT='BATCH', SLURM_PROCID='0', SLURM_NTASKS='1'))
    monkeypatch.setenv(name, '2')
    with pytest.raises(LaunchError) as caught:
        train.main([CONFIG, *flags])
    assert str(caught.value).startswith(f'{name}=2: Slurm holds 2 ')
    assert told in str(caught.value)
    if flags:
        train.main([CONFIG, *flags, '--nnodes', '1'])
        assert started.told[:3] == (2, 1, 1)


@pytest.mark.parametrize(
    ('word', 'shares', 'expected'),
    [('auto', False, 5), ('gpu', False, 5), ('cpu', False, 2), ('auto', True, 2)],
)
def test_words_for_a_number_of_processes_are_counted(monkeypatch, word, shares, expected):
    monkeypatch.setattr(counting, 'usable_cores', lambda: 2)
    family = SimpleNamespace(shares_devices=shares, max_ranks=lambda: 5, name='zeta')
    assert counting.count_devices(word, family) == expected
    family.shares_devices = True
    with pytest.raises(LaunchError, match='--nproc=gpu'):
        counting.count_devices('gpu', family)
