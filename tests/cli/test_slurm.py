"""The scripts for Slurm; stand-ins for srun, sbatch and scontrol start real processes."""

import os
import signal
import subprocess
import sys

import pytest

from tests.cli.running import CONFIG, SHORT
from tests.commands import environment, run, wait_until
from tests.jobs import ROOT, ranks_of

STANDINS = ROOT / 'standins' / 'slurm'


@pytest.fixture
def environ(tmp_path):
    path = os.pathsep.join([str(STANDINS), os.environ['PATH']])
    log = str(tmp_path / 'slurm.log')
    return environment(PATH=path, FAKE_SLURM_LOG=log, DEVICES='2', DEVICES_PER_NODE='2')


def test_a_job_trains_in_all_tasks(tmp_path, environ):
    leftovers = dict(TORCHELASTIC_USE_AGENT_STORE='True', LOCAL_WORLD_SIZE='7', RANK='3')
    done = run(
        *('bash', 'tools/slurm_train.sh', 'part', 'name', CONFIG),
        *('--work-dir', tmp_path / 'work', *SHORT),
        env=dict(environ, SLURM_JOB_ID='4242', GRES='gpu:2', **leftovers),
    )
    assert done.returncode == 0, done.stderr
    assert ranks_of(tmp_path / 'work') == 2
    called = (tmp_path / 'slurm.log').read_text()
    for option in ('-p part', '--ntasks=2', '--gres=gpu:2', '--signal=USR1@60'):
        assert option in called
    assert 'scontrol' not in called  # A job on one host meets on loopback.


WAITS = """
import os, pathlib, signal, sys
here = pathlib.Path(sys.argv[1])
def save(*_):
    (here / ('saved' + os.environ['SLURM_PROCID'])).touch()
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGUSR1, save)
(here / ('ready' + os.environ['SLURM_PROCID'])).touch()
while True:
    signal.pause()
"""


def run_out_of_time(folder, environ, status):
    """A job of two tasks, warned that its time is up, whose tasks save and end with a status."""
    job = subprocess.Popen(
        ['bash', str(ROOT / 'tools' / 'slurm_job.sh'), sys.executable, '-c', WAITS, str(folder),
         str(status)],
        env=dict(environ, SLURM_JOB_ID='4242', SLURM_NTASKS='2'),
    )  # fmt: skip
    try:
        wait_until(lambda: len(list(folder.glob('ready*'))) == 2, 60)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == status
    finally:
        job.kill()
    assert len(list(folder.glob('saved*'))) == 2
    called = (folder / 'slurm.log').read_text().splitlines()
    return [line for line in called if line.startswith('scontrol requeue')]


@pytest.mark.parametrize('status', [0, 3])
def test_a_job_out_of_time_saves_and_goes_back_to_the_queue(tmp_path, environ, status):
    # One that failed to save would fail again.
    expected = ['scontrol requeue 4242'] if status == 0 else []
    assert run_out_of_time(tmp_path, environ, status) == expected


def test_a_task_of_an_array_goes_back_to_the_queue_alone(tmp_path, environ):
    """Slurm gives one task of an array the number of the whole array."""
    environ.update(SLURM_ARRAY_JOB_ID='4242', SLURM_ARRAY_TASK_ID='7')
    assert run_out_of_time(tmp_path, environ, 0) == ['scontrol requeue 4242_7']


def test_a_batch_job_asks_for_the_warning_and_the_queue(tmp_path, environ):
    command = ['bash', 'tools/slurm_train.sh', 'part', 'name', 'no_such.py']
    done = run(*command, env=dict(environ, BATCH='1'))
    assert done.returncode != 0
    assert "'no_such.py' is no file" in done.stderr  # The tasks were started.
    first, second = (tmp_path / 'slurm.log').read_text().splitlines()
    assert first.startswith('sbatch -p part --job-name=name --ntasks=2')
    assert '--requeue' in first
    assert '--signal=B:USR1@60' in first
    assert second.startswith('srun --kill-on-bad-exit=1')


def test_wrong_usage_starts_nothing(tmp_path, environ):
    for script in ('slurm_train.sh', 'slurm_test.sh'):
        done = run('bash', f'tools/{script}', 'part', 'name', env=environ)
        assert done.returncode == 2
        assert 'Usage:' in done.stderr
    assert not (tmp_path / 'slurm.log').exists()
