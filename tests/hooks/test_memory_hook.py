"""MemoryHook: the log line has memory, and host memory that doubles is reported once."""

import re
from multiprocessing import Process

import pytest

from mmdevplug.errors import DevPlugError
from mmdevplug.hooks import MemoryHook, memory_hook
from mmdevplug.hooks.memory_hook import MB
from tests.hooks.memory_jobs import build, train_all
from tests.jobs import log_of
from tests.ranks import in_ranks, run_ranks

CASES = dict(
    worker_leak=dict(workers=2, dataset='KeptOnes'), workers=dict(workers=2), nothing=dict()
)


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    return run_ranks(train_all, 0, tmp_path_factory.mktemp('leaks'), 'cpu', CASES)[0]


@in_ranks()
def test_memory_that_has_doubled_is_reported_once(tmp_path):
    runner = build(tmp_path)
    (hook,) = [hook for hook in runner.hooks if isinstance(hook, MemoryHook)]
    hook._measure_workers = lambda: (40 * MB * runner.iter, 2)
    runner.train()
    (warning,) = re.findall(r'Host memory of rank \d+.* has doubled.*', log_of(tmp_path))
    told = re.search(
        r'of rank 0 with its 2 loader workers has doubled: (\d+) MB in iteration 10 of this run, '
        r'(\d+) MB now.*num_workers=0 .*memray or tracemalloc',
        warning,
    )
    assert 2 <= int(told[2]) / int(told[1]) < 3


def logged(log, iteration, column='host_memory'):
    (line,) = [line for line in log.splitlines() if f'[{iteration:3}/140]' in line]
    found = re.search(rf' {column}: (\d+)', line)
    return None if found is None else int(found[1])


def test_a_worker_that_has_just_ended_holds_nothing(monkeypatch):
    ended = Process(target=int)
    ended.start()
    ended.join()
    monkeypatch.setattr(memory_hook, 'active_children', lambda: [ended])
    hook = MemoryHook()
    hook.before_train(None)
    assert hook._measure_workers() == (0, 1)


def test_memory_of_loader_workers_counts(logs):
    # 2 samples an iteration of half a megabyte each.
    assert 90 < logged(logs['worker_leak'], 140) - logged(logs['worker_leak'], 40) < 130
    # Two workers share what they inherited.
    assert logged(logs['workers'], 140) < logged(logs['nothing'], 140) + 100


def test_host_memory_is_in_the_log_line_and_nothing_else_on_the_cpu(logs):
    assert 50 < logged(logs['nothing'], 100) < 5000
    assert logged(logs['nothing'], 100, 'memory') is None


def test_a_card_has_its_own_column(tmp_path):
    options = dict(hooks=[dict(type='KeepTensors')])
    (logs,) = run_ranks(train_all, 0, tmp_path, 'zeta', dict(leak=options))
    # 100 tensors of 300 x 300 elements.
    assert 30 <= logged(logs['leak'], 100, 'memory') <= 40


@in_ranks()
def test_the_runner_registers_it_unless_turned_off(tmp_path):
    for number, options in enumerate(({}, dict(memory=False))):
        hooks = build(tmp_path / str(number), iterations=1, **options).hooks
        assert any(isinstance(hook, MemoryHook) for hook in hooks) == (not options)
    for value in (dict(interval=500), dict(sample_interval=7)):
        with pytest.raises(DevPlugError, match='accelerator.memory=.*expected True or False'):
            build(tmp_path, iterations=1, memory=value)
