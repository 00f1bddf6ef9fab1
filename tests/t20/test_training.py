"""The digits example trains on the stand-in, on the PyTorch that a T20 runs."""

import os
import sys

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS

from mmdevplug.utils.model import unwrap_model
from tests.checkpoint import test_survival
from tests.jobs import PATHS, PLAIN, digits_config, largest_difference, train_digits, weights_of
from tests.optim.scenarios import SCENARIOS, config, train as train_in_scenario
from tests.ranks import run_ranks
from tests.t20.conftest import FOLDER, MISSING

pytestmark = [pytest.mark.t20, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

#: Iterations of an epoch, each with 128 samples of all ranks.
ITERATIONS = 11
#: Those of the validation after the last epoch.
VALIDATION_ITERATIONS = 6


def train(accelerator, work_dir, **options):
    """Train in a process that has the stand-in; return the results, executions and calls."""
    sys.path.insert(0, str(FOLDER))
    result = train_digits(accelerator, work_dir, **options)
    import t20_card

    index = torch.device(result['device']).index or 0
    result.update(t20_card.card.stats(index), calls=dict(t20_card.calls))
    return result


def _import_card():
    sys.path.insert(0, str(FOLDER))
    import t20_card
    import torch_gcu

    return t20_card, torch_gcu


class Count(Hook):
    """Notes the executions and calls of each iteration, after all other hooks."""

    priority = 'VERY_LOW'

    def __init__(self, t20_card, index):
        self.card, self.index, self.seen = t20_card, index, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        executions = self.card.card.stats(self.index)['executions']
        self.seen.append((dict(executions), dict(self.card.calls)))

    def in_an_iteration(self, first=4, last=8):
        """The most of each in the iterations after warm-up, by name."""
        most = {}
        for before, after in zip(self.seen[first - 1 : last - 1], self.seen[first:last]):
            for old, new in zip(before, after):
                for name, count in new.items():
                    most[name] = max(most.get(name, 0), count - old.get(name, 0))
        return {name: count for name, count in most.items() if count}


def count(work_dir, optim_wrapper, log_interval):
    """Train with clipping, EMA and logging; return what an iteration costs a card."""
    t20_card, torch_gcu = _import_card()
    cfg = config(
        'gcu', work_dir, optim_wrapper,
        train_cfg__max_epochs=1, default_hooks__logger__interval=log_interval,
        custom_hooks=[dict(type='EMAHook')],
    )  # fmt: skip
    runner = RUNNERS.build(cfg)
    counting = Count(t20_card, torch_gcu.current_device())
    runner.register_hook(counting)
    runner.train()
    return counting.in_an_iteration()


FLOAT16 = dict(type='AmpOptimWrapper', dtype='float16', loss_scale='dynamic')
BFLOAT16 = dict(type='AmpOptimWrapper', dtype='bfloat16')


@pytest.mark.parametrize('log_interval', [1, 20])
@pytest.mark.parametrize('optim_wrapper', [{}, FLOAT16, BFLOAT16], ids=['32', '16', 'b16'])
@pytest.mark.parametrize('accumulative_counts', [1, 2])
@pytest.mark.parametrize('world_size', [0, 2])
def test_what_an_iteration_costs_a_card(
    torch_gcu, tmp_path, world_size, accumulative_counts, optim_wrapper, log_interval
):
    options = dict(
        optim_wrapper, clip_grad=dict(max_norm=0.2), accumulative_counts=accumulative_counts
    )
    for costs in run_ranks(count, world_size, tmp_path, options, log_interval):
        graphs = costs.pop('sync_lived_tensor')
        waits = costs.pop('synchronize', 0)
        assert waits == (log_interval == 1)
        # The wait of a logged iteration calls it once more, and then has nothing to execute.
        assert graphs - waits <= 2
        assert costs.pop('autocast', 0) == bool(optim_wrapper)
        assert set(costs) <= {'set_device'}  # nothing implicit, no `unlazy`


def train_scenario(accelerator, work_dir, optim_wrapper, **options):
    _import_card()
    return train_in_scenario(accelerator, work_dir, optim_wrapper, **options)


@pytest.mark.parametrize('scenario', list(SCENARIOS))
@pytest.mark.parametrize('world_size', [0, 2])
def test_scenarios_are_those_of_the_host(torch_gcu, tmp_path, world_size, scenario):
    job = (tmp_path / 'cards', SCENARIOS[scenario])
    on_cards = run_ranks(train_scenario, world_size, 'gcu', *job)
    job = (tmp_path / 'host', SCENARIOS[scenario])
    (on_host,) = run_ranks(train_in_scenario, 0, 'cpu', *job)
    for result in on_cards:
        assert largest_difference(result['weights'], on_host['weights']) < 1e-5


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('world_size', [0, 2])
def test_mixed_precision(torch_gcu, tmp_path, world_size, dtype):
    amp = dict(type='AmpOptimWrapper', dtype=dtype)
    results = run_ranks(train_scenario, world_size, 'gcu', tmp_path / dtype, amp)
    (exact,) = run_ranks(train_in_scenario, 0, 'cpu', tmp_path / 'exact', {})
    for result in results:
        assert result['wrapper'] == 'DeviceAmpOptimWrapper'
        # 8 bits of bfloat16's mantissa, over 22 iterations.
        difference = largest_difference(result['weights'], exact['weights'])
        assert 0 < difference < (0.002 if dtype == 'float16' else 0.01)
        assert largest_difference(result['weights'], results[0]['weights']) == 0.0


def overflow(work_dir, clip):
    scaled = dict(FLOAT16, loss_scale=dict(init_scale=256.0))
    optim_wrapper = dict(scaled, clip_grad=dict(max_norm=0.2)) if clip else scaled
    return train_scenario(
        'gcu', work_dir, optim_wrapper, watch=True,
        train_cfg__max_epochs=1, model__type='OverflowingClassifier',
    )  # fmt: skip


@pytest.mark.parametrize('clip', [False, True])
@pytest.mark.parametrize('world_size', [0, 2])
def test_all_ranks_skip_the_step_in_which_one_overflowed(torch_gcu, tmp_path, world_size, clip):
    results = run_ranks(overflow, world_size, tmp_path, clip)
    for result in results:
        assert result['unchanged'] == [5]
        assert result['scales'] == [256.0] * 5 + [128.0] * 6
        assert largest_difference(result['weights'], results[0]['weights']) == 0.0


def load_from(work_dir, path):
    """Load a checkpoint into a job that validates once; return the weights it holds then."""
    t20_card, _ = _import_card()
    t20_card.card.set_lose_weights(True)
    cfg = digits_config('gcu', work_dir, **PLAIN, load_from=str(path))
    runner = RUNNERS.build(cfg)
    runner.load_or_resume()
    return weights_of(unwrap_model(runner.model))


@pytest.mark.parametrize('world_size', [0, 2])
def test_weights_are_loaded_into_a_model_that_was_never_computed(torch_gcu, tmp_path, world_size):
    (trained,) = run_ranks(train_plain_on_host, 0, tmp_path / 'host')
    for weights in run_ranks(load_from, world_size, tmp_path, tmp_path / 'host' / 'last.pth'):
        assert largest_difference(weights, trained) == 0.0


def train_plain_on_host(work_dir):
    result = train_digits('cpu', work_dir, **PLAIN)['weights']
    torch.save(
        dict(state_dict={k: torch.as_tensor(v) for k, v in result.items()}), f'{work_dir}/last.pth'
    )
    return result


def train_plain(accelerator, work_dir):
    return train(accelerator, work_dir, **PLAIN)


@pytest.mark.parametrize('world_size', [0, 2, 8])
def test_digits(torch_gcu, tmp_path, world_size):
    results = run_ranks(train, world_size, 'gcu', tmp_path)
    assert results[0]['accuracy'] >= 97.0
    for rank, result in enumerate(results):
        assert result['device'] == f'xla:{rank}'
        assert result['staged'] == bool(world_size)
        assert result['calls']['sync_lived_tensor'] > 0


@pytest.mark.parametrize('world_size', [0, 2, 8])
def test_weights_are_those_of_the_host(torch_gcu, tmp_path, world_size):
    on_cards = run_ranks(train_plain, world_size, 'gcu', tmp_path / 'cards')
    (on_host,) = run_ranks(train_plain, 0, 'cpu', tmp_path / 'host')
    for result in on_cards:
        assert largest_difference(result['weights'], on_host['weights']) < 1e-4


def test_an_iteration_is_one_execution(torch_gcu, tmp_path):
    (result,) = run_ranks(train_plain, 0, 'gcu', tmp_path)
    iterations = ITERATIONS * PLAIN['train_cfg__max_epochs'] + VALIDATION_ITERATIONS
    # Nothing reads a value that is still to be computed: no `item`, no `copy to host`.
    assert set(result['executions']) <= {'sync_lived_tensor', 'unlazy'}
    assert sum(result['executions'].values()) <= iterations + 3
    assert result['compilations'] <= 6


def kill(folder, monkeypatch, world_size, kills, length):
    """Train with dropout under torchrun; processes are killed by a plan and started again."""
    monkeypatch.setattr(test_survival, 'PATHS', f'{PATHS}{os.pathsep}{FOLDER}')
    last, happened, _ = test_survival.run_job(
        folder, world_size, kills, 'gcu', length,
        checkpoint=dict(test_survival.CHECKPOINT),
        train_dataloader__sampler=dict(type='InfiniteSampler', shuffle=True),
    )  # fmt: skip
    return last, happened


@pytest.mark.timeout(600)
@pytest.mark.parametrize(('world_size', 'kills'), [(1, 3), (2, 4), (8, 1)])
def test_kills_change_no_bit(torch_gcu, tmp_path, monkeypatch, world_size, kills):
    length = 12 * kills + 6
    whole, _ = kill(tmp_path / 'whole', monkeypatch, world_size, 0, length)
    killed, happened = kill(tmp_path / 'killed', monkeypatch, world_size, kills, length)
    assert len(happened) == kills
    test_survival.assert_equal_bits(whole, killed)
