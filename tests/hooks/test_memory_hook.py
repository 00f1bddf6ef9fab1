"""MemoryHook: the log line has memory, and host memory that doubles is reported once."""

import re

import pytest

from mmdevplug.errors import DevPlugError
from mmdevplug.hooks import MemoryHook
from mmdevplug.hooks.memory_hook import MB, _has_doubled
from tests.hooks.memory_jobs import SOON, build, log_of, train_all, warnings_of
from tests.ranks import RanksFailed, run_ranks

CASES = dict(
    worker_leak=dict(workers=2, dataset='KeptOnes'), workers=dict(workers=2), nothing=dict()
)
CASES = {name: dict(options, memory=SOON) for name, options in CASES.items()}


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    return run_ranks(train_all, 0, tmp_path_factory.mktemp('leaks'), 'cpu', CASES)[0]


@pytest.mark.parametrize(
    ('before', 'used', 'doubled'),
    [(409, 1194, True), (409, 800, False), (100, 350, False), (4000, 7000, False)],
)
def test_memory_has_doubled_if_it_grew_by_more_than_a_little(before, used, doubled):
    assert _has_doubled(before * MB, used * MB) is doubled


def train_with_growing_workers(work_dir):
    runner = build(work_dir, memory=SOON)
    (hook,) = [hook for hook in runner.hooks if isinstance(hook, MemoryHook)]
    hook._workers.measure = lambda: (40 * MB * runner.iter, 2)
    runner.train()
    return warnings_of(log_of(work_dir))


def test_memory_that_has_doubled_is_reported_once(tmp_path):
    ((warning,),) = run_ranks(train_with_growing_workers, 0, tmp_path)
    told = re.search(
        r'of rank 0 with its 2 loader workers has doubled: (\d+) MB in iteration 10 of this run, '
        r'(\d+) MB now.*num_workers=0 .*memray or tracemalloc',
        warning,
    )
    assert 2 <= int(told[2]) / int(told[1]) < 3


def host_memory(log, iteration):
    (line,) = [line for line in log.splitlines() if f'[{iteration:3}/140]' in line]
    return int(re.search(r'host_memory: (\d+)', line).group(1))


def test_memory_of_loader_workers_counts(logs):
    # 2 samples an iteration of half a megabyte each.
    assert 90 < host_memory(logs['worker_leak'], 140) - host_memory(logs['worker_leak'], 40) < 130
    # Two workers share what they inherited.
    assert host_memory(logs['workers'], 140) < host_memory(logs['nothing'], 140) + 100


def test_host_memory_is_in_the_log_line_and_nothing_else_on_the_cpu(logs):
    (line,) = [line for line in logs['nothing'].splitlines() if '[100/140]' in line]
    assert 50 < int(re.search(r'host_memory: (\d+)', line).group(1)) < 5000
    assert ' memory: ' not in line


def test_a_card_has_its_own_column(tmp_path):
    options = dict(hooks=[dict(type='KeepTensors')], memory=SOON)
    (logs,) = run_ranks(train_all, 0, tmp_path, 'zeta', dict(leak=options))
    (line,) = [line for line in logs['leak'].splitlines() if '[100/140]' in line]
    # 100 tensors of 300 x 300 elements.
    assert 30 <= int(re.search(r' memory: (\d+)', line).group(1)) <= 40


class CountingCalls:
    """Stands where an accelerator's function was."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


def empty_caches(work_dir, **memory):
    runner = build(work_dir, 'zeta', iterations=20, memory=memory)
    accelerator = runner.device_context.accelerator
    accelerator.empty_cache = CountingCalls(accelerator.empty_cache)
    runner.train()
    return accelerator.empty_cache.calls


def empty_caches_every(work_dir, interval):
    return empty_caches(work_dir, interval=interval)


def test_caches_are_emptied_only_when_asked_for(tmp_path):
    assert run_ranks(empty_caches_every, 0, tmp_path / 'six', 6) == [3]
    assert run_ranks(empty_caches_every, 0, tmp_path / 'off', None) == [0]


def registered(work_dir, option):
    runner = build(work_dir, iterations=1, **({} if option is None else dict(memory=option)))
    return [hook.options.sample_interval for hook in runner.hooks if isinstance(hook, MemoryHook)]


def test_the_runner_registers_it_unless_turned_off(tmp_path):
    for name, option, expected in (
        ('default', None, [50]),
        ('off', False, []),
        ('dict', dict(sample_interval=7), [7]),
    ):
        assert run_ranks(registered, 0, tmp_path / name, option) == [expected]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(registered, 0, tmp_path / 'wrong', dict(every=7))
    kind, message, _ = failed.value.errors[0]
    assert kind == 'DevPlugError'
    assert "accelerator.memory has no option 'every'" in message
    assert 'sample_interval' in message


@pytest.mark.parametrize(
    ('name', 'value'),
    [('interval', 0), ('sample_interval', None)],
)
def test_wrong_arguments_are_named(name, value):
    with pytest.raises(DevPlugError, match=rf'MemoryHook\.{name}={value!r}.*expected'):
        MemoryHook(**{name: value})
