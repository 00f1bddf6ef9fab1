"""Signals to the process that started a job: ranks save and end, and no process is left.

Jobs are started as users start them, with everything below one process, whose end is looked at
from outside.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.jobs import PATHS, ROOT
from tests.ranks import free_port

from .starting import DIGITS, MAIN, Container, Started, check_saved, need_namespaces, write_config


def test_kill_saves_and_leaves_no_process(tmp_path):
    """`kill PID`, with workers that load data; then the same command with --resume."""
    work_dir = tmp_path / 'work'
    command = [*MAIN, 'train', write_config(tmp_path, workers=2), '--nproc', '2']
    command += ['--work-dir', work_dir]
    job = Started(tmp_path, command)
    job.wait_for_iteration(3)
    assert len(job.look()) >= 6  # two ranks, two workers of each
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM
    stopped = check_saved(job, work_dir)
    assert 'Traceback' not in job.printed
    assert 'SIGTERM is passed on to 2 process(es)' in job.printed
    assert job.printed.splitlines()[-1] == (
        'mmdevplug: ended by SIGTERM; all ranks of this host ended, each with status 0.'
    )

    again = Started(tmp_path, [*command, '--resume'])
    again.wait_for_iteration(stopped + 2)
    assert again.end(signal.SIGINT) == 128 + signal.SIGINT
    assert check_saved(again, work_dir) > stopped
    assert 'Traceback' not in again.printed


def test_the_script_as_process_1_of_a_container(tmp_path):
    """The kernel drops signals to process 1 that nobody handles: bash, then Python, are it."""
    need_namespaces()
    command = ['bash', 'tools/dist_train.sh', write_config(tmp_path), '2', '--work-dir']
    job = Container(tmp_path, [*command, tmp_path / 'work'], PORT=str(free_port()))
    job.wait_for_iteration(3)
    assert job.end(signal.SIGUSR1) == 128 + signal.SIGUSR1
    check_saved(job, tmp_path / 'work')
    assert 'Traceback' not in job.printed


@pytest.mark.long
def test_a_single_process_as_process_1_of_a_container(tmp_path):
    need_namespaces()
    command = [*MAIN, 'train', write_config(tmp_path), '--work-dir', tmp_path / 'work']
    job = Container(tmp_path, command)
    job.wait_for_iteration(3, ranks=1)
    assert job.end(signal.SIGHUP) == 128 + signal.SIGHUP
    path = Path((tmp_path / 'work' / 'last_checkpoint').read_text())
    assert path.name == f'interrupted_iter_{job.done(0)}.pth'
    # Before training begins, too.
    job = Container(tmp_path, command)
    job.wait_until(lambda: 'device cpu (cpu)' in job.printed)
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM, job.printed[-3000:]
    assert job.done(0) == 0


@pytest.mark.long
def test_ranks_that_hang_are_killed_by_a_second_signal(tmp_path):
    config = write_config(tmp_path, what='hang', rank=1, iteration=4)
    command = [*MAIN, 'train', config, '--nproc', '2', '--work-dir', tmp_path / 'work']
    job = Started(tmp_path, command)
    job.wait_for_iteration(4)
    job.look()
    job.process.send_signal(signal.SIGHUP)
    time.sleep(4)
    assert job.process.poll() is None
    assert job.end(signal.SIGHUP) == 128 + signal.SIGHUP
    assert 'after a second signal' in job.printed


@pytest.mark.long
def test_nothing_is_left_of_a_job_whose_command_is_killed(tmp_path):
    """`kill -9 PID`, which nobody can pass on; ranks miss what their command held."""
    config = write_config(tmp_path, workers=1)
    command = [*MAIN, 'train', config, '--nproc', '2', '--work-dir', tmp_path / 'work']
    job = Started(tmp_path, command)
    job.wait_for_iteration(3)
    assert len(job.look()) >= 4  # two ranks, a worker of each
    job.process.kill()
    _, left = psutil.wait_procs(job.below.values(), timeout=120)
    assert job.end() == -signal.SIGKILL
    assert left == [], job.printed
    said = f'stops because of the command that started the ranks (pid {job.process.pid}): it holds'
    assert said in job.printed
    assert 'frame #' not in job.printed


SLOW_THREAD = """
import ctypes, os, platform, signal, sys, threading, time
def end(number, frame):
    def last():
        time.sleep(1)
        os._exit(int(sys.argv[1]))
    threading.Thread(target=last).start()
    ctypes.CDLL(None).syscall(dict(x86_64=60).get(platform.machine(), 93), 0)  # this thread alone
signal.signal(signal.SIGTERM, end)
print('ready', flush=True)
while True:
    time.sleep(1)
"""
PASSES_ON = """
import signal, subprocess, sys
from torch.distributed.elastic.utils.logging import get_logger
from mmdevplug.cli.forward_signals import RankSignals
command = [sys.executable, '-c', sys.argv[1], sys.argv[2]]
rank = subprocess.Popen(command, stdout=subprocess.PIPE)
rank.stdout.readline()
signals = RankSignals()
try:
    signals.handle(signal.SIGTERM)
except BaseException as error:
    get_logger('torch.distributed.elastic.x').warning('Received 15 death signal')
    get_logger('torch.distributed.elastic.x').error('an error')
print(signals.ended_well)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='ends one thread by a call to Linux')
@pytest.mark.parametrize('status', [0, 3])
def test_the_status_of_a_rank_whose_threads_end_later_is_waited_for(status):
    """It is a zombie as soon as its main thread has ended."""
    words = [sys.executable, '-c', PASSES_ON, SLOW_THREAD, str(status)]
    env = dict(os.environ, PYTHONPATH=PATHS)
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(status == 0)], done.stderr
    assert 'death signal' not in done.stderr
    assert ('an error' in done.stderr) == (status != 0)


@pytest.mark.long
def test_nohup_keeps_a_job_alive(tmp_path):
    command = [*MAIN, 'train', write_config(tmp_path), '--nproc', '2']
    job = Started(tmp_path, ['nohup', *command, '--work-dir', tmp_path / 'work'])
    job.wait_for_iteration(3)
    job.process.send_signal(signal.SIGHUP)
    for process in job.look():
        process.send_signal(signal.SIGHUP)
    job.wait_for_iteration(job.done(0) + 10)
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM
    check_saved(job, tmp_path / 'work')


@pytest.mark.long
def test_a_signal_to_every_process_of_a_job(tmp_path):
    """As Slurm, systemd and torchrun do: workers of data loaders are among them."""
    command = ['-m', 'torch.distributed.run', '--nproc_per_node=2']
    command += [f'--master_port={free_port()}']
    command = [sys.executable, *command, 'tools/train.py', write_config(tmp_path, workers=2)]
    job = Started(tmp_path, [*command, '--launcher', 'pytorch', '--work-dir', tmp_path / 'work'])
    job.wait_for_iteration(3)
    assert len(job.look()) >= 6
    assert job.end(signal.SIGTERM) != 0
    check_saved(job, tmp_path / 'work')


@pytest.mark.long
def test_a_test_ends_with_its_processes(tmp_path):
    """`dist_test.sh`, whose ranks have nothing to save."""
    short = ['--work-dir', tmp_path / 'work', '--cfg-options', 'train_cfg.max_epochs=1']
    train = subprocess.run(
        [*MAIN, 'train', DIGITS, *short], cwd=ROOT, env=dict(os.environ, PYTHONPATH=PATHS)
    )
    assert train.returncode == 0
    config = write_config(tmp_path, when='test')
    command = ['bash', 'tools/dist_test.sh', config, tmp_path / 'work' / 'epoch_1.pth', '2']
    job = Started(tmp_path, [*command, '--work-dir', tmp_path / 't'], PORT=str(free_port()))
    job.wait_for_iteration(1)
    assert job.end(signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert 'ended by SIGUSR1' in job.printed.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize('moment', [0.2, 0.6])
def test_a_signal_while_processes_are_started(tmp_path, moment):
    """torchrun forgets processes that it started before the signal."""
    command = [*MAIN, 'train', write_config(tmp_path), '--nproc', '40', '--oversubscribe']
    job = Started(tmp_path, [*command, '--work-dir', tmp_path / 'work'])
    # The server of ranks, the process that checks devices, and a rank at least.
    job.wait_until(lambda: len(job.look()) > 2)
    time.sleep(moment)
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert 'Traceback' not in job.printed
    assert not (tmp_path / 'work' / 'last_checkpoint').exists()
