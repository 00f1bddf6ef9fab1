"""The shell, the network and the limits of the host, in real circumstances."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from mmdevplug.checks import launch

from .running import the

LEFT_OVER = dict(
    RANK='5',
    WORLD_SIZE='2',
    LOCAL_RANK='5',
    MASTER_ADDR='node7',
    MASTER_PORT='29501',
    TORCHELASTIC_RUN_ID='old',
)


def test_nothing_set_is_ok():
    assert [f.level for f in launch.examine({'HOME': '/root'})] == ['ok']


def test_what_an_old_job_left_is_named_with_the_line_that_removes_it():
    found = the(
        launch.examine({**LEFT_OVER, 'HOME': '/'}), 'warning', 'RANK=5', 'MASTER_ADDR=node7'
    )
    assert found.remedy.startswith('unset ')
    code = 'import os, json; print(json.dumps(dict(os.environ)))'
    script = f'{found.remedy}; {shlex.quote(sys.executable)} -c "{code}"'
    printed = subprocess.check_output(['bash', '-c', script], env={**os.environ, **LEFT_OVER})
    left = json.loads(printed)
    assert set(left).isdisjoint(LEFT_OVER)
    assert [f.level for f in launch.examine(left) if f.level == 'warning'] == []


def test_contradictions_of_what_is_left_are_named():
    found = the(launch.examine(LEFT_OVER), 'warning')
    assert 'RANK=5 and WORLD_SIZE=2 disagree' in found.found


@pytest.mark.parametrize(
    ('environ', 'named'),
    [
        (dict(SLURM_PROCID='3', SLURM_NTASKS='2', SLURM_LOCALID='0'), 'SLURM_PROCID=3'),
        (dict(SLURM_PROCID='abc', SLURM_NTASKS='2'), "SLURM_PROCID='abc'"),
        (dict(OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_SIZE='2'), 'OMPI_COMM_WORLD_LOCAL_RANK'),
    ],
)
def test_contradictions_of_schedulers_are_errors(environ, named):
    environ = dict(environ, SLURM_NODELIST='localhost', SLURM_NNODES='1')
    found = the(launch.examine(environ), 'error', named)
    assert found.remedy.startswith('unset ')


def test_values_of_other_variables_are_not_told():
    secret = 'hf_' + 'secret' * 3
    environ = {**LEFT_OVER, 'HF_TOKEN': secret, 'TORCHELASTIC_ERROR_FILE': secret}
    assert secret not in json.dumps([f._asdict() for f in launch.examine(environ)])
