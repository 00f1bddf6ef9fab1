"""MemoryHook: leaks are found and named, caches are not leaks, the log line has memory."""

import re

import numpy as np
import pytest
import torch

from mmdevplug.errors import DevPlugError
from mmdevplug.hooks import MemoryHook
from mmdevplug.utils.memory_growth import LATEST, MB, GrowthDetector, ObjectCounts
from tests.hooks.memory_jobs import SOON, build, train_all, warnings_of
from tests.ranks import RanksFailed, run_ranks

LEAST = 10 * MB


def reports(values):
    """The iterations at which a detector reports growth."""
    detector = GrowthDetector(LEAST)
    return [number for number, value in enumerate(values) if detector.add(number, int(value))]


def noise(count, size=3 * MB, seed=0):
    return np.random.default_rng(seed).uniform(0, size, count)


def test_steady_growth_is_reported_and_again_when_doubled():
    found = reports(300 * MB + np.arange(400) * MB + noise(400))
    assert found[0] < 30
    assert 3 <= len(found) <= 6  # 16, 32, 64, 128, 256 MB
    gaps = np.diff(found)
    assert all(later > earlier for earlier, later in zip(gaps, gaps[1:]))


def test_slow_growth_is_reported_in_the_end():
    assert reports(300 * MB + np.arange(2000) * 0.02 * MB + noise(2000, MB))


def test_growth_that_begins_late_is_reported_soon():
    values = 300 * MB + noise(3000) + np.maximum(np.arange(3000) - 2500, 0) * 2.0 * MB
    found = reports(values)
    assert 2500 < found[0] < 2540


@pytest.mark.parametrize(
    'values',
    [
        300 * MB + noise(4000, 40 * MB, 1),
        300 * MB + 200 * MB * (np.arange(500) > 100) + noise(500),
        300 * MB + 200 * MB * (1 - 0.9 ** np.arange(500)) + noise(500),
        # A sawtooth: garbage that is collected now and then.
        300 * MB + (np.arange(2000) % 13) * 4 * MB,
    ],
    ids=['noise', 'jump', 'cache', 'sawtooth'],
)
def test_what_is_no_growth(values):
    assert reports(values) == []


def test_a_detector_keeps_a_limited_number_of_samples():
    detector = GrowthDetector(LEAST)
    for number in range(5000):
        detector.add(number, 300 * MB)
    held = [value for value in vars(detector).values() if hasattr(value, '__len__')]
    assert held
    assert max(map(len, held)) <= LATEST


def test_growth_below_what_was_in_use_long_ago_is_none():
    values = np.concatenate([np.full(20, 900 * MB), 300 * MB + np.arange(100) * 2 * MB])
    assert reports(values) == []


def test_no_address_of_a_tensor_on_a_lazy_device_is_read(monkeypatch):
    kept = torch.zeros(64, 128), torch.zeros(64, 128)
    read = torch.Tensor.data_ptr
    asked = []  # tensors that earlier tests left behind may lie on other devices
    monkeypatch.setattr(
        torch.Tensor, 'data_ptr', lambda tensor: asked.append(tensor.device.type) or read(tensor)
    )
    counts = ObjectCounts(lazy_type='cpu')
    assert 'cpu' not in asked
    assert counts.bytes['Tensor (64, 128) float32'] >= sum(each.numel() * 4 for each in kept)
    ObjectCounts(lazy_type='xla')
    assert 'cpu' in asked


def test_object_counts_do_not_count_themselves():
    before = ObjectCounts()
    grown = ObjectCounts().growth_since(before)
    assert not [kind for kind in grown if kind.startswith('set:')]


def test_object_counts_have_parameters_that_have_no_shape_yet():
    before = ObjectCounts()
    kept = [torch.nn.LazyLinear(2) for _ in range(4)]
    name = 'UninitializedParameter without a shape yet'
    assert ObjectCounts().counts[name] - before.counts[name] == 2 * len(kept)


def test_object_counts_have_arrays_tensors_and_containers():
    before = ObjectCounts()
    kept = dict(
        tensors=[torch.zeros(64, 128) for _ in range(7)],
        arrays=[np.zeros((3, 1000, 100)) for _ in range(5)],
        text=[b'x' * (MB + number) for number in range(4)],
    )
    kept['views'] = [tensor[:] for tensor in kept['tensors']]
    grown = ObjectCounts().growth_since(before)
    assert 'Tensor (64, 128) float32: +14 objects, +0.2 MB' in grown
    assert 'ndarray (3, 1000, 100) float64: +5 objects, +11.4 MB' in grown
    assert 'bytes: +4 objects, +4.0 MB' in grown
    assert grown.index('bytes: +4 objects, +4.0 MB') == 1  # by bytes


CASES = dict(
    losses=dict(hooks=[dict(type='KeepLosses')], model=dict(hidden=128)),
    tensors=dict(hooks=[dict(type='KeepTensors')]),
    cache=dict(hooks=[dict(type='CacheThatSettles')]),
    some=dict(hooks=[dict(type='KeepTensors', most=40)]),
    nothing=dict(),
    worker_leak=dict(workers=2, dataset='KeptOnes'),
    workers=dict(workers=2),
)
CASES = {name: dict(options, memory=SOON) for name, options in CASES.items()}


@pytest.fixture(scope='module')
def logs(tmp_path_factory):
    found = {}
    for names in (['losses'], ['tensors'], ['worker_leak', 'workers', 'cache', 'some', 'nothing']):
        # What one leak gave back would be room for the next one's first tensors.
        cases = {name: CASES[name] for name in names}
        found.update(*run_ranks(train_all, 0, tmp_path_factory.mktemp('leaks'), 'cpu', cases))
    return found


def test_losses_kept_with_their_graph_are_named(logs):
    first = warnings_of(logs['losses'])[0]
    assert 'host memory rose by' in first
    assert re.search(r'Tensor \(\) float32 with its graph: \+5 objects', first)


def test_a_list_of_tensors_is_named_first(logs):
    first = warnings_of(logs['tensors'])[0]
    assert re.search(r'iteration \d+: Tensor \(300, 300\) float32: \+5 objects, \+1.7 MB', first)


@pytest.mark.parametrize('case', ['cache', 'some', 'nothing', 'workers'])
def test_no_leak_no_warning(logs, case):
    assert warnings_of(logs[case]) == []


def host_memory(log, iteration):
    (line,) = [line for line in log.splitlines() if f'[{iteration:3}/140]' in line]
    return int(re.search(r'host_memory: (\d+)', line).group(1))


def test_memory_of_loader_workers_counts(logs):
    # 2 samples an iteration of half a megabyte each.
    assert 90 < host_memory(logs['worker_leak'], 140) - host_memory(logs['worker_leak'], 40) < 130
    first = warnings_of(logs['worker_leak'])[0]
    assert re.search(r'that of 2 loader workers rose by \d+\.\d MB from iteration', first)
    assert 'set num_workers=0 (and persistent_workers=False)' in first
    # Two workers share what they inherited.
    assert host_memory(logs['workers'], 140) < host_memory(logs['nothing'], 140) + 100


def test_host_memory_is_in_the_log_line_and_nothing_else_on_the_cpu(logs):
    (line,) = [line for line in logs['nothing'].splitlines() if '[100/140]' in line]
    assert 50 < int(re.search(r'host_memory: (\d+)', line).group(1)) < 5000
    assert ' memory: ' not in line


def test_a_card_has_its_own_column(tmp_path):
    options = dict(hooks=[dict(type='KeepTensors')], memory=SOON)
    (logs,) = run_ranks(train_all, 0, tmp_path, 'zeta', dict(leak=options))
    log = logs['leak']
    (line,) = [line for line in log.splitlines() if '[100/140]' in line]
    # 100 tensors of 300 x 300 elements.
    assert 30 <= int(re.search(r' memory: (\d+)', line).group(1)) <= 40
    assert any('zeta:0 rose by' in warning for warning in warnings_of(log))


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
    [('interval', 0), ('sample_interval', None), ('warmup', -1), ('growth_mb', 'much')],
)
def test_wrong_arguments_are_named(name, value):
    with pytest.raises(DevPlugError, match=rf'MemoryHook\.{name}={value!r}.*expected'):
        MemoryHook(**{name: value})


@pytest.mark.parametrize('value', [None, 0, 7, 0.5, np.float64(2), np.float32(2), float('inf')])
def test_the_growth_to_report_may_be_any_number(value):
    assert MemoryHook(growth_mb=value).options.growth_mb == value


@pytest.mark.parametrize('value', [True, float('nan'), '7'])
def test_the_growth_to_report_must_be_a_number(value):
    with pytest.raises(DevPlugError, match='expected a number of at least 0, or None'):
        MemoryHook(growth_mb=value)


def test_endless_growth_is_reported_by_nobody_who_asks_for_infinity():
    detector = GrowthDetector(float('inf'))
    assert not any(detector.add(number, number * MB) for number in range(100))
