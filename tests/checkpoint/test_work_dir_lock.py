"""Two jobs and one work directory: the second is refused unless the first has ended."""

import json
import os
import re
import subprocess
import time

import pytest

from mmdevplug.checkpoint import work_dir_lock
from mmdevplug.checkpoint.work_dir_lock import NAME, locked_work_dir
from mmdevplug.errors import CheckpointError
from tests.data.jobs import build
from tests.ranks import RanksFailed, _context, run_ranks, start_process


def hold(folder, connection):
    with locked_work_dir(folder):
        connection.send(os.getpid())
        connection.poll(None)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path until it receives a message."""
    ours, theirs = _context.Pipe()
    process = start_process(hold, tmp_path, theirs)
    assert ours.recv() == process.pid
    process.connection = ours
    yield process
    process.kill()
    process.join()


def held(folder):
    return json.loads((folder / NAME).read_text())


def test_a_lock_is_released_when_it_ends_and_when_an_error_does(tmp_path):
    with locked_work_dir(tmp_path):
        assert held(tmp_path)['pid'] == os.getpid()
        with locked_work_dir(tmp_path):  # a second runner of this process
            pass
        assert held(tmp_path)['pid'] == os.getpid()
    assert not (tmp_path / NAME).exists()
    with pytest.raises(SystemExit), locked_work_dir(tmp_path):
        raise SystemExit(0)
    assert not (tmp_path / NAME).exists()


def test_another_job_is_refused_and_a_killed_one_leaves_no_obstacle(tmp_path, holder, caplog):
    with pytest.raises(CheckpointError) as caught, locked_work_dir(tmp_path):
        pass
    message = str(caught.value)
    found = held(tmp_path)
    assert f"work_dir='{tmp_path}' is in use by process {holder.pid} on host" in message
    assert re.search(r'since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d', message)
    assert '--work-dir' in message
    assert found['pid'] == holder.pid  # untouched

    holder.kill()
    holder.join()
    with locked_work_dir(tmp_path):
        assert held(tmp_path)['pid'] == os.getpid()
    assert not (tmp_path / NAME).exists()


def test_a_process_that_ends_by_itself_releases_it(tmp_path, holder):
    holder.connection.send('end')
    holder.join()
    assert holder.exitcode == 0
    assert not (tmp_path / NAME).exists()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A lock of another host, and little patience."""
    monkeypatch.setattr(work_dir_lock, 'SILENT_SECONDS', 1.5)
    (tmp_path / NAME).write_text(
        json.dumps(dict(host='far', pid=1, began=1, since='yesterday', system='far 1', job='77'))
    )
    return tmp_path / NAME


def test_another_hosts_lock_counts_as_long_as_it_changes(tmp_path, elsewhere):
    beating = subprocess.Popen(['bash', '-c', f'while sleep 0.2; do touch -c {elsewhere}; done'])
    try:
        with pytest.raises(CheckpointError, match='process 1 on host far, .* since yesterday'):
            with locked_work_dir(tmp_path):
                pass
    finally:
        beating.kill()
        beating.wait()
    with locked_work_dir(tmp_path):
        assert held(tmp_path)['pid'] == os.getpid()


def test_a_job_that_slurm_started_again_takes_its_own_lock_at_once(
    tmp_path, elsewhere, monkeypatch
):
    monkeypatch.setattr(work_dir_lock, '_changes', lambda *_: True)
    for job, restarted in (('78', True), ('77', False)):
        monkeypatch.setenv('SLURM_JOB_ID', job)
        with pytest.raises(CheckpointError), locked_work_dir(tmp_path, restarted):
            pass
    monkeypatch.setenv('SLURM_JOB_ID', '77')
    with locked_work_dir(tmp_path, restarted=True):
        assert held(tmp_path)['pid'] == os.getpid()


def test_the_holder_shows_that_it_is_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(work_dir_lock, 'BEAT_SECONDS', 0.05)
    with locked_work_dir(tmp_path):
        before = (tmp_path / NAME).stat().st_mtime_ns
        deadline = time.monotonic() + 60
        while (tmp_path / NAME).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_number_of_an_ended_process_may_be_used_again(tmp_path, holder):
    found = held(tmp_path)
    (tmp_path / NAME).write_text(json.dumps(dict(found, began=found['began'] - 1)))
    with locked_work_dir(tmp_path):
        assert held(tmp_path)['pid'] == os.getpid()


@pytest.mark.parametrize('text', ['', '{', '[]', '{"pid": "x"}'])
def test_a_lock_without_content_counts_as_left_behind(tmp_path, monkeypatch, text):
    monkeypatch.setattr(work_dir_lock, 'SILENT_SECONDS', 0.3)
    (tmp_path / NAME).write_text(text)
    with locked_work_dir(tmp_path):
        assert held(tmp_path)['pid'] == os.getpid()


def train(folder):
    runner = build(folder)
    held_while = []
    runner.call_hook = lambda name, **_: held_while.append((runner.rank, (folder / NAME).exists()))
    runner.train()
    return sorted(set(held_while))


def test_a_job_holds_it_while_it_trains_and_a_second_ends_on_all_ranks(tmp_path, holder):
    """Testing needs no lock."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(train, 2, tmp_path)
    kinds = {rank: kind for rank, (kind, _, _) in caught.value.errors.items()}
    assert kinds == {0: 'CheckpointError', 1: 'RankFailedError'}
    for _, message, _ in caught.value.errors.values():
        assert f'process {holder.pid} on host' in message
    assert held(tmp_path)['pid'] == holder.pid
    assert not list(tmp_path.glob('*.pth'))
    build(tmp_path).val()
    holder.kill()
    holder.join()
    assert run_ranks(train, 2, tmp_path) == [[(0, True)], [(1, True)]]
    assert not (tmp_path / NAME).exists()
