"""Launch variables of an earlier job: which they are, and that no process is misled by them."""

import os
import re
import sys

import pytest
from mmengine.registry import RUNNERS

from mmdevplug.cli import test, train
from mmdevplug.environments.launch_variables import (
    LaunchEnv,
    forget_stale_variables,
    refuse_to_run_alone,
    restarts,
)
from mmdevplug.environments.stale import stale_variables, unset_line
from mmdevplug.errors import LaunchError
from tests.cli.running import CONFIG, SHORT
from tests.commands import run
from tests.jobs import PLAIN, digits_config
from tests.ranks import AGENT, in_ranks

#: What the second of two hosts with four processes each sees under torchrun.
TORCHRUN = dict(
    RANK='5', LOCAL_RANK='1', WORLD_SIZE='8', MASTER_ADDR='10.0.0.1', MASTER_PORT='12345',
    LOCAL_WORLD_SIZE='4', GROUP_RANK='1', GROUP_WORLD_SIZE='2', ROLE_NAME='default',
    ROLE_RANK='5', ROLE_WORLD_SIZE='8', **AGENT,
)  # fmt: skip
SCHEDULER = dict(SLURM_PROCID='0', SLURM_NTASKS='1', OMPI_COMM_WORLD_RANK='0', HOME='/root')


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


#: What others set, too.
SHARED = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
PLACE = {name: TORCHRUN[name] for name in SHARED}


@pytest.mark.parametrize(
    ('launcher', 'environ', 'stale'),
    [
        ('none', {**TORCHRUN, **SCHEDULER}, TORCHRUN),
        ('none', SCHEDULER, {}),
        ('none', dict(RANK=''), dict(RANK='')),
        ('pytorch', TORCHRUN, {}),
        ('pytorch', without(PLACE, 'LOCAL_RANK'), {}),  # set by hand
        # A part of what the agent sets.
        *(('pytorch', without(TORCHRUN, name), without(AGENT, name)) for name in AGENT),
        # What torchrun alone sets.
        ('slurm', {**TORCHRUN, **SCHEDULER}, without(TORCHRUN, *SHARED)),
        ('mpi', {**TORCHRUN, **SCHEDULER}, without(TORCHRUN, *SHARED)),
    ],
)
def test_variables_of_torchrun_are_stale_where_another_started_the_process(
    launcher, environ, stale
):
    assert stale_variables(launcher, environ) == stale


def test_unset_line_is_a_shell_command():
    line = unset_line(stale_variables('none', TORCHRUN))
    done = run('bash', '-c', f'{line}; env', env=dict(os.environ, **TORCHRUN))
    left = {line.split('=')[0] for line in done.stdout.splitlines()}
    assert done.returncode == 0
    assert not left & set(TORCHRUN)


MEMBER = dict(RANK='1', WORLD_SIZE='2', MASTER_ADDR='10.0.0.1')


@pytest.mark.parametrize(
    'environ',
    [
        dict(MEMBER, LOCAL_RANK='0'),
        dict(MEMBER, TORCHELASTIC_RUN_ID='none'),
        dict(MEMBER, WORLD_SIZE='1', RANK='0'),
        dict(PET_NNODES='1', PET_NPROC_PER_NODE='4'),
        without(MEMBER, 'WORLD_SIZE'),
        SCHEDULER,
        dict(PLACE, WORLD_SIZE='1', RANK='0'),
        # A part of the variables; without LOCAL_RANK those left may be a pod's.
        *(without(PLACE, name) for name in PLACE if name != 'LOCAL_RANK'),
    ],
)
def test_what_torchrun_left_or_one_pod_has_is_no_membership(environ):
    refuse_to_run_alone(environ)


SLURM = dict(
    SLURM_PROCID='0', SLURM_NTASKS='2', SLURM_STEP_NUM_TASKS='2', SLURM_LOCALID='0',
    SLURM_STEP_ID='0', SLURM_STEP_TASKS_PER_NODE='2', SLURM_JOB_ID='7',
)  # fmt: skip
OPEN_MPI = {f'OMPI_COMM_WORLD_{name}': '2' for name in ('RANK', 'SIZE', 'LOCAL_RANK')}


@pytest.mark.parametrize(
    ('environ', 'launcher'),
    [
        (PLACE, 'pytorch'),
        (TORCHRUN, 'pytorch'),
        (dict(PLACE, LOCAL_WORLD_SIZE='4'), 'pytorch'),
        (without(TORCHRUN, 'TORCHELASTIC_RESTART_COUNT'), 'pytorch'),
        (SLURM, 'slurm'),
        (OPEN_MPI, 'mpi'),
    ],
)
def test_one_of_several_does_not_run_alone(environ, launcher):
    with pytest.raises(LaunchError, match='alone') as caught:
        refuse_to_run_alone(environ)
    assert f"--launcher {launcher} (in a script launcher='{launcher}')" in str(caught.value)
    # What it says of a single process is a way out.
    names = re.search(r'unset ([A-Z_ ]+)$', str(caught.value)).group(1).split()
    refuse_to_run_alone(without(environ, *names))


@pytest.mark.parametrize('main', [train.main, test.main])
def test_a_command_does_not_leave_a_job_unnoticed(monkeypatch, main):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    arguments = [CONFIG, *(['x.pth'] if main is test.main else [])]
    with pytest.raises(LaunchError, match='RANK=5 .* would train alone.*--launcher pytorch'):
        main(arguments)


def test_the_user_may_keep_a_process_apart(monkeypatch):
    for name, value in {**PLACE, **SLURM}.items():
        monkeypatch.setenv(name, value)
    forget_stale_variables('none')
    assert not set(PLACE) & set(os.environ)
    refuse_to_run_alone()


@pytest.mark.parametrize(
    ('changes', 'told'),
    [
        ({}, '^RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 say'),
        (dict(RANK='2'), 'RANK'),
        (dict(RANK='x'), 'RANK'),
        (dict(MASTER_ADDR=' '), 'MASTER_ADDR'),
        (dict(WORLD_SIZE='x'), 'WORLD_SIZE'),
    ],
)
def test_a_member_of_a_job_does_not_run_alone_even_if_it_makes_no_sense(changes, told):
    with pytest.raises(LaunchError, match=told):
        refuse_to_run_alone(dict(MEMBER, **changes))


@in_ranks()
def test_a_job_of_slurm_drops_torchruns_variables():
    """What a job of Slurm sees after a stale job of torchrun."""
    os.environ.update(TORCHRUN)
    LaunchEnv('slurm', 0, 0, 2, 1, '127.0.0.1', 29500).export()
    assert {name: os.environ[name] for name in TORCHRUN if name in os.environ} == dict(
        RANK='0', LOCAL_RANK='0', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='29500',
        LOCAL_WORLD_SIZE='1',
    )  # fmt: skip


@pytest.mark.parametrize(
    'leftovers',
    [
        without(TORCHRUN, 'MASTER_ADDR'),
        dict(LOCAL_WORLD_SIZE='x', MASTER_PORT='-1', TORCHELASTIC_RESTART_COUNT='x'),
    ],
    ids=['torchrun', 'nonsense'],
)
@in_ranks()
def test_a_single_process_trains_and_leaves_the_variables_alone(tmp_path, leftovers):
    """A library's call, without our command line."""
    cfg = digits_config('cpu', tmp_path, **dict(PLAIN, train_cfg__max_epochs=1))
    os.environ.update(leftovers)
    before = dict(os.environ)
    runner = RUNNERS.build(cfg)
    runner.train()
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    assert type(runner.model).__name__ == 'DigitsClassifier'
    assert runner.iter > 0
    assert not changed & set(TORCHRUN)


def test_two_processes_of_torchrun_do_not_train_apart_unnoticed(tmp_path):
    # A process of its own, by whose command line the agent is known.
    done = run(
        *(sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2', '--master_port=0'),
        *('tools/train.py', CONFIG, '--launcher', 'none', '--work-dir', tmp_path, *SHORT),
    )
    assert done.returncode != 0
    assert 'Pass --launcher pytorch' in done.stderr
    assert not list(tmp_path.glob('**/*.pth'))


@pytest.mark.parametrize(
    ('launcher', 'environ', 'count'),
    [
        ('pytorch', dict(TORCHELASTIC_RESTART_COUNT='2'), 2),
        ('slurm', dict(SLURM_RESTART_COUNT='1'), 1),
        ('pytorch', dict(TORCHELASTIC_RESTART_COUNT='1', SLURM_RESTART_COUNT='1'), 2),
        ('slurm', dict(TORCHELASTIC_RESTART_COUNT='2'), 0),
        ('none', dict(TORCHELASTIC_RESTART_COUNT='2', SLURM_RESTART_COUNT='1'), 0),
        ('pytorch', dict(TORCHELASTIC_RESTART_COUNT='0'), 0),
        ('pytorch', {}, 0),
    ],
)
def test_restarts_are_counted_where_they_happen(launcher, environ, count):
    assert restarts(launcher, environ) == count


@pytest.mark.parametrize('value', ['', 'two', '-1', '1.5'])
@pytest.mark.parametrize(('launcher', 'by'), [('pytorch', 'TORCHELASTIC'), ('slurm', 'SLURM')])
def test_a_count_of_restarts_that_is_no_number_is_refused(launcher, by, value):
    with pytest.raises(LaunchError, match=f'^{by}_RESTART_COUNT='):
        restarts(launcher, {f'{by}_RESTART_COUNT': value})
