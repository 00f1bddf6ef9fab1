"""A signal to any rank: all ranks finish the same iteration, save and end."""

import os
import select
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from mmengine.registry import RUNNERS

from mmdevplug.hooks.preemption_hook import PreemptionHook
from tests.checkpoint.resuming import quickly
from tests.checkpoint.training import build
from tests.commands import wait_until
from tests.fault_tolerance import accidents  # noqa: F401  registers a hook
from tests.jobs import digits_config, load_file, note
from tests.ranks import free_port, launch_variables, run_ranks, start_process


def train(environ, accelerator, work_dir, output, options):
    """A rank, with the exit status that training gives it."""
    os.environ.update(environ)
    output = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    batch = 96 // int(environ.get('WORLD_SIZE', 1))
    cfg = digits_config(
        accelerator, work_dir, train_dataloader__batch_size=batch, train_cfg__val_interval=100
    )
    cfg.merge_from_dict({key.replace('__', '.'): value for key, value in options.items()})
    RUNNERS.build(cfg).train()


class Job:
    """The ranks of a training, each in its own process."""

    def __init__(self, folder, world_size, accelerator='cpu', **options):
        self.folder, self.notes = folder, folder / 'notes'
        self.notes.mkdir()
        port, self.ranks = free_port(), []
        accident = dict(type='Accident', note=str(self.notes), pause=0.05)
        options.setdefault('custom_hooks', [accident])
        for rank in range(max(world_size, 1)):
            environ = launch_variables(rank, world_size, port) if world_size else {}
            args = (environ, accelerator, str(folder), str(folder / f'out{rank}'), options)
            self.ranks.append(start_process(train, *args))

    def signal_after(self, iteration, rank, number):
        """Send a signal to a rank when rank 0 has done an iteration."""
        wait_until(lambda: self.done(0) >= iteration or not self.ranks[0].is_alive(), 180)
        assert self.ranks[0].is_alive(), self.output(0)
        self.signal(rank, number)

    def done(self, rank):
        note = self.notes / str(rank)
        words = note.read_text().split() if note.exists() else []
        return int(words[1]) if len(words) == 2 else 0

    def signal(self, rank, number):
        os.kill(self.ranks[rank].pid, number)

    def output(self, rank):
        return (self.folder / f'out{rank}').read_text()

    def end(self):
        try:
            for process in self.ranks:
                process.join(120)
            assert not any(process.is_alive() for process in self.ranks)
        finally:
            for process in self.ranks:
                process.kill()
        return [process.exitcode for process in self.ranks]

    def checkpoint(self):
        return Path((self.folder / 'last_checkpoint').read_text())


def check_saved(job, stopped):
    assert f'iter_{stopped}.pth' in job.checkpoint().name
    saved = load_file(job.checkpoint())
    assert saved['meta']['iter'] == stopped
    lines = [line for line in job.output(0).splitlines() if 'Stopped after iteration' in line]
    assert len(lines) == 1
    assert f'Stopped after iteration {stopped} ' in lines[0]
    assert '--resume' in lines[0]


@pytest.mark.parametrize(
    ('ranks', 'signalled', 'number', 'options'),
    [
        (3, 1, signal.SIGTERM, {}),
        (3, 0, signal.SIGUSR1, {}),
        # Gradients that accumulate, whose iterations exchange nothing.
        (2, 1, signal.SIGTERM, dict(optim_wrapper__accumulative_counts=4)),
        pytest.param(2, 1, signal.SIGTERM, dict(accelerator='xla'), marks=pytest.mark.xla),
    ],
    ids=['SIGTERM', 'SIGUSR1', 'accumulation', 'xla'],
)
def test_all_ranks_stop_after_the_same_iteration(tmp_path, ranks, signalled, number, options):
    job = Job(tmp_path, ranks, **options)
    job.signal_after(3, signalled, number)
    assert job.end() == [0] * ranks
    (stopped,) = {job.done(rank) for rank in range(ranks)}
    assert 3 < stopped < 16 * 14
    check_saved(job, stopped)
    assert number.name in job.output(0)
    assert f'rank {signalled} of {ranks}' in job.output(0)


@pytest.mark.parametrize('hook', ['CheckpointHook', 'OwnCheckpointHook'])
def test_a_single_process_stops_at_once_and_goes_on_from_there(tmp_path, hook):
    options = dict(default_hooks__checkpoint__type=hook)
    job = Job(tmp_path, 0, **options)
    job.signal_after(3, 0, signal.SIGTERM)
    assert job.end() == [128 + signal.SIGTERM]
    check_saved(job, job.done(0))
    again = tmp_path / 'again'
    again.mkdir()
    options.update(resume=True, load_from=str(job.checkpoint()), train_cfg__max_epochs=2)
    second = Job(again, 0, **options)
    assert second.end() == [0]
    assert f'iter: {job.done(0)}' in second.output(0)


def test_a_second_sigterm_ends_at_once(tmp_path):
    accident = dict(type='Accident', note=str(tmp_path / 'notes'), what='hang', rank=0)
    job = Job(tmp_path, 0, custom_hooks=[accident])
    job.signal_after(7, 0, signal.SIGTERM)
    time.sleep(4)
    assert job.ranks[0].is_alive()
    job.signal(0, signal.SIGTERM)
    assert job.end() == [-signal.SIGTERM]


def test_without_the_hook_a_signal_ends_the_process(tmp_path):
    job = Job(tmp_path, 0, accelerator__preemption=False)
    job.signal_after(3, 0, signal.SIGTERM)
    assert job.end() == [-signal.SIGTERM]
    assert not (tmp_path / 'last_checkpoint').exists()


def _signal(runner, **_):
    if runner.iter == 3 and runner.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)  # the request takes up to two pauses of 0.5 s


def _stopped_then_trained(folder):
    """Train until a signal, catch what ends the process, and train once more."""
    iterations = []
    for number, signalled in enumerate([True, False, True]):
        options = dict(by_epoch=False, length=40, experiment_name=f'run {number}')
        with quickly():
            runner = build(folder / str(number), **options)
            if signalled:
                note(runner, 'before_train_iter', _signal)
            try:
                runner.train()
            except SystemExit:
                runner.train_loop._iter += 1  # which the loop did not come to
        iterations.append(runner.iter)
    return iterations


def test_a_second_training_is_not_stopped_by_a_request_to_the_first(tmp_path):
    one, other = run_ranks(_stopped_then_trained, 2, tmp_path)
    assert one == other
    first, second, third = one
    assert 3 < first < 40
    assert second == 40
    assert 3 < third < 40


def test_sigint_of_a_single_process_saves_and_is_a_keyboard_interrupt(tmp_path):
    job = Job(tmp_path, 0)
    job.signal_after(3, 0, signal.SIGINT)
    assert job.end() == [1]  # multiprocessing's status of an exception
    check_saved(job, job.done(0))
    assert 'KeyboardInterrupt' in job.output(0)


def test_handlers_are_put_back_and_one_that_ignores_stays():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]

    hook, hangup = PreemptionHook(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = handlers()
        hook.before_train(None)
        assert [new == old for new, old in zip(handlers(), before)] == [False, True]
        hook.after_train(None)
        assert handlers() == before
    finally:
        signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize('error', [ValueError, SystemExit])
def test_a_training_that_raises_leaves_no_handler_and_no_thread(tmp_path, error):
    def fail(runner, *args, **kwargs):
        raise error

    def left():
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    before, threads = left(), threading.enumerate()
    runner = build(tmp_path)
    note(runner, 'before_train_iter', fail)
    with pytest.raises(error):
        runner.train()
    assert left() == before
    for thread in set(threading.enumerate()) - set(threads):
        thread.join(10)
        assert not thread.is_alive(), thread  # it would hold a pair of sockets


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_another_thread_takes_wakes_the_main_thread(number):
    """As gloo's threads do, which block no signal."""
    other = threading.Thread(target=threading.Event().wait, daemon=True)
    other.start()
    hook, before = PreemptionHook(), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)  # of a command that another test has run here
    hook.before_train(None)
    requests = []
    hook._agreement.request = requests.append
    sending = threading.Timer(0.2, signal.pthread_kill, (other.ident, number))
    sending.start()
    try:
        # A sleep that no handler cuts short, in which Python runs handlers if a signal comes.
        began = time.monotonic()
        select.select([], [], [], 2)
        assert len(requests) == 1
        assert hook._handled - began < 1.5
    finally:
        hook.after_train(None)
    assert signal.set_wakeup_fd(before) == before
