"""Signals and deaths, looked at from outside: ranks save and end, and no process is left."""

import os
import signal
import socket
import time

import psutil
import pytest

from tests.cli.running import DIGITS
from tests.cli.starting import Started, check_saved, write_config
from tests.commands import CLI, run
from tests.ranks import free_port


def train(folder, *words, workers=0, **hook):
    config = write_config(folder, workers=workers, **hook)
    return [*CLI, 'train', config, '--nproc', '2', '--work-dir', folder / 'work', *words]


def server_of(job):
    """The process that ranks are forked from, and what else there is below the command."""
    command = psutil.Process(job.process.pid)
    (server,) = [one for one in command.children() if 'forkserver' in ' '.join(one.cmdline())]
    return server


def test_kill_saves_and_leaves_no_process(tmp_path):
    """`kill PID`, with workers that load data; then the same command with --resume."""
    command = train(tmp_path, workers=2)
    job = Started(tmp_path, command)
    job.wait_for_iteration(3)
    below = psutil.Process(job.process.pid).children()
    # Besides the server Python's own process that removes semaphores.
    assert len(below) == 2
    assert len(server_of(job).children()) == 2
    assert len(job.look()) == 8  # and two workers of each rank
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM
    stopped = check_saved(job, tmp_path / 'work')
    assert 'Warning' not in job.printed
    assert job.printed.splitlines()[-1] == 'mmdevplug: ended by SIGTERM.'

    again = Started(tmp_path, [*command, '--resume'])
    again.wait_for_iteration(stopped + 2)
    assert again.end(signal.SIGINT) == 128 + signal.SIGINT
    assert check_saved(again, tmp_path / 'work') > stopped


@pytest.mark.long
@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGUSR1])
def test_other_signals_save_too(tmp_path, number):
    job = Started(tmp_path, train(tmp_path))
    job.wait_for_iteration(3)
    assert job.end(number) == 128 + number
    check_saved(job, tmp_path / 'work')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_rank_or_to_everybody_saves(tmp_path, number):
    """To all processes, as a terminal, Slurm and systemd do; or to one rank alone."""
    job = Started(tmp_path, train(tmp_path, workers=1))
    job.wait_for_iteration(3)
    job.look()
    if number == signal.SIGINT:
        os.killpg(job.process.pid, number)
    else:
        pid = int((job.notes / '1').read_text().split()[0])
        os.kill(pid, number)
    assert job.end() == 128 + number, job.printed
    check_saved(job, tmp_path / 'work')


@pytest.mark.long
def test_ctrl_c_twice_ends_ranks_that_hang(tmp_path):
    job = Started(tmp_path, train(tmp_path, what='hang', rank=1, iteration=4))
    job.wait_for_iteration(4)
    job.look()
    os.killpg(job.process.pid, signal.SIGINT)
    time.sleep(6)  # within 3 s it is the same notice
    assert job.process.poll() is None
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.end() == 128 + signal.SIGINT, job.printed


@pytest.mark.parametrize(
    ('who', 'hung'), [('command', False), ('command', True), ('server', False), ('rank', True)]
)
def test_nothing_is_left_where_one_is_killed(tmp_path, who, hung):
    """`kill -9 PID`, which nobody can pass on; also where workers of data loaders hang."""
    job = Started(tmp_path, train(tmp_path, workers=1))
    job.wait_for_iteration(3)
    assert len(job.look()) == 6
    rank = psutil.Process(int((job.notes / '1').read_text().split()[0]))
    for worker in rank.children() if hung else ():
        worker.suspend()
    victim = dict(command=job.process, server=server_of(job), rank=rank)[who]
    victim.kill()
    _, left = psutil.wait_procs(job.below.values(), timeout=60)
    assert left == [], job.printed
    status, last = job.end(), job.printed.splitlines()[-1]
    assert status == (-signal.SIGKILL if who == 'command' else 1)
    if who == 'command':
        assert f'the command (pid {job.process.pid}) that started this rank is gone' in job.printed
    elif who == 'server':
        assert 'mmdevplug: the process that ranks are forked from was killed' in job.printed
    else:
        assert last.startswith('mmdevplug: rank ')
        assert 'rank 1' in last
        assert 'the process is gone' in last or 'was ended by SIGKILL' in last
    assert 'frame #' not in job.printed
    if who != 'server':  # whose end workers of data loaders hear of late
        assert 'Traceback' not in job.printed


@pytest.mark.long
def test_a_signal_while_another_host_is_waited_for(tmp_path):
    found = [each for one in psutil.net_if_addrs().values() for each in one]
    found = [each.address for each in found if each.family == socket.AF_INET]
    address = next((each for each in found if not each.startswith('127.')), None)
    if address is None:
        pytest.skip('this host has no address but that of its loopback interface')
    with socket.create_server((address, 0)) as main:  # which takes connections, and says nothing
        hosts = ['--nnodes', '2', '--node-rank', '1', '--master-addr', address]
        hosts += ['--master-port', str(main.getsockname()[1])]
        job = Started(tmp_path, [*train(tmp_path), *hosts])
        main.settimeout(60)
        connection, _ = main.accept()
        with connection:
            assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert job.printed.splitlines()[-1] == 'mmdevplug: ended by SIGTERM.'
    assert 'Traceback' not in job.printed


@pytest.mark.long
def test_nohup_keeps_a_job_alive(tmp_path):
    job = Started(tmp_path, ['nohup', *train(tmp_path)])
    job.wait_for_iteration(3)
    job.process.send_signal(signal.SIGHUP)
    for process in job.look():
        process.send_signal(signal.SIGHUP)
    job.wait_for_iteration(job.done(0) + 10)
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM
    check_saved(job, tmp_path / 'work')


@pytest.mark.long
def test_a_test_ends_with_its_processes(tmp_path):
    """`dist_test.sh`, whose ranks have nothing to save."""
    short = ['--work-dir', tmp_path / 'work', '--cfg-options', 'train_cfg.max_epochs=1']
    done = run(*CLI, 'train', DIGITS, *short)
    assert done.returncode == 0
    config = write_config(tmp_path, when='test')
    command = ['bash', 'tools/dist_test.sh', config, tmp_path / 'work' / 'epoch_1.pth', '2']
    job = Started(tmp_path, [*command, '--work-dir', tmp_path / 't'], PORT=str(free_port()))
    job.wait_for_iteration(1)
    assert job.end(signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert 'ended by SIGUSR1' in job.printed.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize('moment', [0.2, 0.6])
def test_a_signal_while_processes_are_started(tmp_path, moment):
    command = [*CLI, 'train', write_config(tmp_path), '--nproc', '40', '--oversubscribe']
    job = Started(tmp_path, [*command, '--work-dir', tmp_path / 'work'])
    job.wait_until(lambda: len(job.look()) > 2)  # a rank at least
    time.sleep(moment)
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM, job.printed
    assert 'Traceback' not in job.printed
    assert not (tmp_path / 'work' / 'last_checkpoint').exists()
