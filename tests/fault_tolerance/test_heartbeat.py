"""Signs of life: what they hold, who is silent, and when that ends a process."""

import ctypes
import json
import os
import re
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch import distributed as torch_dist, ones

from mmdevplug import init_device
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.fault_tolerance import failure, failure_watch
from mmdevplug.fault_tolerance.failure import enter_phase
from mmdevplug.fault_tolerance.heartbeat import SILENT_SECONDS, Beat, Heartbeat
from tests.ranks import (
    _context,
    _work,
    check_errors,
    errors_of_ranks,
    free_port,
    in_ranks,
    launch_variables,
    run_ranks,
    start_process,
)


def start(**options):
    init_device('pytorch', 'cpu', **dict(dict(timeout=60), **options))
    return int(os.environ['RANK']), failure.current_watch()


def look_at_each_other():
    rank, watch = start()
    enter_phase(f'phase of rank {rank}')
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        seen = watch.heartbeat.read(1 - rank)
        if seen is not None and seen.phase.startswith('phase of'):
            break
        time.sleep(0.1)
    first = seen
    while watch.heartbeat.read(1 - rank).count == first.count:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    wait_for_everyone('the end')
    return first.phase, first.pid, os.getpid(), first.at, first.state


def test_each_rank_knows_what_the_other_does():
    (phase_of_1, pid_of_1, pid_0, at, state), (phase_of_0, pid_of_0, pid_1, _, _) = run_ranks(
        look_at_each_other, 2
    )
    assert (phase_of_0, phase_of_1) == ('phase of rank 0', 'phase of rank 1')
    assert (pid_of_0, pid_of_1) == (pid_0, pid_1)
    assert state == 'running'
    assert at


@in_ranks(2)
def test_a_main_thread_that_waits_in_the_store_beats():
    rank, watch = start()
    if rank == 0:
        with pytest.raises(RuntimeError):
            watch.main_store.wait(['never'], timedelta(seconds=7))
        assert watch.heartbeat._count >= 3
    wait_for_everyone('the end')


@pytest.mark.parametrize('locked', [False, True])
@in_ranks(2)
def test_threads_share_a_connection_to_the_store(locked):
    """Four threads beside the one that beats use its connection to the store.

    PyTorch 1.10 has no lock, so the package has; with `locked` on later releases, too.
    """
    if locked:
        failure.THREADS_SHARE_STORES = False
    rank, watch = start()
    wrong = []

    def use(number):
        key, value = f'{rank}/{number}', str(number) * 10**number
        try:
            for turn in range(200):
                watch.watch_store.set(key, value)
                found = (
                    watch.watch_store.get(key).decode(),
                    watch.watch_store.add(f'{key}/turns', 1),
                )
                if found != (value, turn + 1):
                    wrong.append(f'thread {number}, turn {turn}')
        except Exception as error:
            wrong.append(f'thread {number}: {type(error).__name__}: {error}')

    threads = [threading.Thread(target=use, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    wait_for_everyone('the end')
    assert wrong == []
    assert watch._store_error is None
    assert not any(thread.is_alive() for thread in threads)


def hang():

    failure_watch.STOP_SECONDS = 3.0
    rank, _ = start(timeout=8)
    enter_phase('loading a batch' if rank == 1 else 'averaging')
    with failure.fail_together('training'):
        if rank == 1:
            time.sleep(3600)
        torch_dist.all_reduce(ones(1))


@pytest.mark.long
def test_a_collective_that_times_out_names_who_hangs():
    errors = errors_of_ranks(hang, 3, together=True)
    assert sorted(errors) == [0, 1, 2]
    assert errors.pop(1)[0] == 'Died'  # ended by its thread
    check_errors(
        errors,
        'RankFailedError',
        'because of rank 1 of 3',
        "in 'loading a batch'",
        'anks 0, 2 waited for rank 1 longer than env_cfg.dist_cfg.timeout',
        "ranks 0, 2 in 'averaging' at all_reduce, test_heartbeat.py",
    )


def test_the_clock_stands_while_the_process_does():
    clock = Heartbeat(None, SimpleNamespace(rank=0), longest_step=0.1)
    time.sleep(0.5)
    assert clock.tick() == pytest.approx(0.1)


def test_beats_are_json():
    beat = Beat(1, 'running', 'set-up', 0.5, 'host', 7, 'table', 'a.py:1 in f', 60.0)
    assert Beat(*json.loads(json.dumps(beat))) == beat


def test_a_rank_is_described_with_its_silence():
    heartbeat = Heartbeat(None, SimpleNamespace(rank=0, world_size=2), 0.1)
    beat = Beat(1, 'running', 'epoch 3', 0.5, 'elsewhere', 7, 'of another host', '', 60.0)
    heartbeat.seen[1] = beat
    heard = "rank 1 of 2 on host elsewhere (pid 7), in 'epoch 3'"
    assert heartbeat.describe(1) == heard
    heartbeat.now = SILENT_SECONDS
    assert heartbeat.describe(1) == f'{heard}, last seen {SILENT_SECONDS:.0f} s ago'


def hold_the_interpreter(report):
    """A rank whose thread cannot beat for long, and then is stopped."""
    output = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    failure_watch.SILENT_SECONDS, failure_watch.STOP_SECONDS = 3.0, 1.0
    failure_watch.REPORT_SECONDS = 5.0
    rank, watch = start()
    watch.heartbeat.patience = 4.0
    enter_phase('compiling' if rank == 1 else 'averaging')
    failure.before_abort(lambda: print(f'callback of {rank}', flush=True))
    with failure.fail_together('training'):
        wait_for_everyone('beginning')
        if rank == 1:
            time.sleep(2)
            ctypes.PyDLL(None).sleep(11)  # PyDLL does not release the lock
        # Only a rank that waits in a collective, not here, would notice nothing by itself.
        time.sleep(15 if rank == 0 else 2)
        assert watch.peer_failure() is None
        print(f'rank {rank} goes on', flush=True)
        wait_for_everyone('compiled')
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(90)


def test_a_rank_that_holds_the_interpreter_is_alive_and_a_stopped_one_is_not(tmp_path):
    path, port, processes, opened = tmp_path / 'output', free_port(), [], []
    for rank in range(2):
        ours, theirs = _context.Pipe()
        opened.append(ours)  # a rank that is done waits for the other end to close
        variables = launch_variables(rank, 2, port)
        work = (theirs, variables, hold_the_interpreter, (str(path),))
        processes.append(start_process(_work, *work))
    first, second = processes
    try:
        first.join(90)
        assert first.exitcode == 1
        assert second.is_alive()
    finally:
        for process in processes:
            process.kill()
    busy, _, rest = path.read_text().partition('rank 0 goes on')
    assert re.search(r"Nothing has gone on for \d+ s: .*rank 1 in 'compiling'.* last seen", busy)
    assert 'stops because' not in busy
    assert 'rank 1 goes on' in busy + rest
    assert re.search("because of rank 1 of 2 .* in 'compil", rest)
    assert 'callback of 0' in rest
    assert 'no sign of life' in rest
    assert 'the process is stopped (SIGSTOP' in rest
    assert 'killed' not in rest
