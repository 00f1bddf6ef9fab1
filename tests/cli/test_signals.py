"""Signals to the process that started a job: ranks save and end, and no process is left.

Jobs are started as users start them, with everything below one process, whose end is looked at
from outside.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.jobs import PATHS, ROOT, load_file
from tests.ranks import free_port

DIGITS = str(ROOT / 'configs' / 'digits' / 'digits_cpu.py')
MAIN = [sys.executable, '-m', 'mmdevplug.cli.main']


def write_config(folder, workers=0, **hook):
    """A job without an end, whose ranks note their process and their last iteration."""
    hook = dict(dict(type='Accident', note=str(folder / 'notes'), pause=0.05), **hook)
    path = folder / 'job.py'
    path.write_text(
        f'_base_ = [{DIGITS!r}]\n'
        "custom_imports = dict(imports=['mmdevplug', 'mmdevplug.examples.digits', "
        "'tests.fault_tolerance.accidents'])\n"
        f'custom_hooks = [{hook!r}]\n'
        'train_cfg = dict(max_epochs=1000, val_interval=1000)\n'
        f'train_dataloader = dict(batch_size=100, num_workers={workers})\n'
        'default_hooks = dict(checkpoint=dict(interval=1000))\n'
    )
    return str(path)


class Started:
    """A command and everything below it."""

    def __init__(self, folder, command, **environ):
        self.folder, self.notes = folder, folder / 'notes'
        self.notes.mkdir(exist_ok=True)
        for note in self.notes.iterdir():
            note.unlink()
        env = dict(os.environ, PYTHONPATH=PATHS, PYTHON=sys.executable, OMP_NUM_THREADS='1')
        env.update(environ)
        self.path = folder / 'printed'
        with open(self.path, 'w') as output:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env=env, stdout=output, stderr=output,
                start_new_session=True,
                # The tests themselves may run under nohup, which children inherit.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )  # fmt: skip
        self.below = {}

    @property
    def printed(self):
        return self.path.read_text()

    def wait_until(self, reached, seconds=150):
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.05)

    def done(self, rank):
        note = self.notes / str(rank)
        words = note.read_text().split() if note.exists() else []
        return int(words[1]) if len(words) == 2 else 0

    def wait_for_iteration(self, iteration, ranks=2):
        self.wait_until(lambda: all(self.done(rank) >= iteration for rank in range(ranks)))

    def look(self):
        """Remember every process below the command, if it still runs."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.below[process.pid] = process
        return list(self.below.values())

    def end(self, number=None):
        """Send a signal to the command alone; its exit status, once nothing is left."""
        self.look()
        try:
            if number is not None:
                os.kill(self.process.pid, number)
            status = self.process.wait(120)
            _, left = psutil.wait_procs(self.below.values(), timeout=10)
            assert left == [], self.printed
        finally:
            for process in [*self.below.values(), psutil.Process(os.getpid())]:
                if process.pid != os.getpid() and process.is_running():
                    process.kill()
            if self.process.poll() is None:
                self.process.kill()
        return status


def check_saved(job, work_dir):
    """All ranks stopped after the same iteration, which the newest checkpoint is of."""
    path = Path((work_dir / 'last_checkpoint').read_text())
    (stopped,) = {job.done(rank) for rank in range(2)}
    assert path.name == f'interrupted_iter_{stopped}.pth'
    assert load_file(path)['meta']['iter'] == stopped
    return stopped


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
    assert job.printed.splitlines()[-1].startswith('mmdevplug: ended by SIGTERM')

    again = Started(tmp_path, [*command, '--resume'])
    again.wait_for_iteration(stopped + 2)
    assert again.end(signal.SIGINT) == 128 + signal.SIGINT
    assert check_saved(again, work_dir) > stopped
    assert 'Traceback' not in again.printed


def in_container(command):
    """A command as process 1 of its own process namespace, as containers have it."""
    return ['unshare', '--pid', '--fork', '--mount-proc', '--kill-child', *command]


def need_namespaces():
    done = subprocess.run(in_container(['true']), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'no namespaces for processes: {done.stderr}')


class Container(Started):
    """The same as process 1; signals go to it and not to ``unshare``."""

    def __init__(self, folder, command, **environ):
        super().__init__(folder, in_container(command), **environ)

    def end(self, number=None):
        (first,) = psutil.Process(self.process.pid).children()
        self.look()
        first.send_signal(number)
        return super().end()


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
    job.wait_until(lambda: 'Distributed training' in job.printed)
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
    command += ['--cfg-options', 'accelerator.heartbeat_timeout=6']
    job = Started(tmp_path, command)
    job.wait_for_iteration(3)
    assert len(job.look()) >= 4  # two ranks, a worker of each
    job.process.kill()
    _, left = psutil.wait_procs(job.below.values(), timeout=60)
    assert job.end() == -signal.SIGKILL
    assert left == [], job.printed
    assert 'which torchrun on the host of rank 0 holds, has not answered' in job.printed


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
    agents = []

    def started():
        job.look()
        agents[:] = psutil.Process(job.process.pid).children()
        with suppress(psutil.NoSuchProcess):  # the one that counts devices ends by itself
            return any('cli.train' in ' '.join(one.cmdline()) for one in agents)
        return False

    job.wait_until(started)
    time.sleep(moment)
    assert job.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert 'Traceback' not in job.printed
    assert not (tmp_path / 'work' / 'last_checkpoint').exists()
