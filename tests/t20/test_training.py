"""The digits example trains on the stand-in, on the PyTorch that a T20 runs."""

import os
import sys
from functools import lru_cache, partial
from itertools import product

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS

from mmdevplug.utils.model import unwrap_model
from tests.checkpoint import test_survival
from tests.columns import job_of
from tests.jobs import (
    PATHS,
    PLAIN,
    digits_config,
    largest_difference,
    train_digits,
    train_plain,
    weights_of,
)
from tests.model.test_move import gradients_of_hooked
from tests.optim.scenarios import (
    SCENARIOS,
    check_skipped,
    config,
    overflow,
    train as train_in_scenario,
)
from tests.ranks import run_ranks
from tests.t20.conftest import FOLDER, ON_T20

pytestmark = ON_T20

T20 = job_of('gcu')
#: Iterations of an epoch, each with 128 samples of all ranks.
ITERATIONS = 11
#: Those of the validation after the last epoch.
VALIDATION_ITERATIONS = 6


def train(accelerator, work_dir, **options):
    """Train in a process that has the stand-in; return the results, executions and calls."""
    import t20_card

    result = train_digits(accelerator, work_dir, **options)
    index = torch.device(result['device']).index or 0
    result.update(t20_card.card.stats(index), calls=dict(t20_card.calls))
    return result


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


def count(work_dir, case):
    """Train with clipping, EMA and logging; return what an iteration costs a card."""
    import t20_card
    import torch_gcu

    accumulative_counts, precision, log_interval = case
    clipped = dict(clip_grad=dict(max_norm=0.2), accumulative_counts=accumulative_counts)
    cfg = config(
        'gcu', work_dir, dict(MIXED.get(precision, {}), **clipped),
        train_cfg__max_epochs=1, default_hooks__logger__interval=log_interval,
        custom_hooks=[dict(type='EMAHook')], experiment_name=f'count_{case}',
    )  # fmt: skip
    runner = RUNNERS.build(cfg)
    counting = Count(t20_card, torch_gcu.current_device())
    runner.register_hook(counting)
    runner.train()
    return counting.in_an_iteration()


#: What mixes precisions, by the dtype.
MIXED = dict(
    float16=dict(type='AmpOptimWrapper', dtype='float16', loss_scale='dynamic'),
    bfloat16=dict(type='AmpOptimWrapper', dtype='bfloat16'),
)

#: Iterations that share a step, the precision, and iterations from one log to the next.
COSTS = list(product([1, 2], ['float32', *MIXED], [1, 20]))


def count_all(work_dir):
    return {case: count(work_dir, case) for case in COSTS}


@pytest.mark.parametrize('world_size', [0, 2])
def test_what_an_iteration_costs_a_card(torch_gcu, tmp_path, world_size):
    for counted in run_ranks(count_all, world_size, tmp_path, **T20):
        assert list(counted) == COSTS
        for (_, precision, log_interval), costs in counted.items():
            graphs = costs.pop('sync_lived_tensor')
            waits = costs.pop('synchronize', 0)
            assert waits == (log_interval == 1)
            # The wait of a logged iteration calls it once more, and then has nothing to execute.
            assert graphs - waits <= 2
            assert costs.pop('autocast', 0) == (precision in MIXED)
            assert set(costs) <= {'set_device'}  # nothing implicit, no `unlazy`


def train_scenarios(accelerator, work_dir, names):
    found = {**SCENARIOS, **AUTOCAST, 'float32': {}}
    return {
        name: train_in_scenario(accelerator, work_dir / name, found[name], experiment_name=name)
        for name in names
    }


#: Mixed precision as it is by default.
AUTOCAST = {dtype: dict(type='AmpOptimWrapper', dtype=dtype) for dtype in MIXED}


@pytest.fixture(scope='module')
def on_cards(torch_gcu, tmp_path_factory):
    """For a number of ranks: what each found of each scenario, trained in one job."""
    folder = tmp_path_factory.mktemp('cards')

    @lru_cache(maxsize=None)
    def of(world_size):
        names = [*SCENARIOS, *AUTOCAST]
        work_dir = folder / str(world_size)
        return run_ranks(train_scenarios, world_size, 'gcu', work_dir, names, **T20)

    return of


@pytest.fixture(scope='module')
def on_host(tmp_path_factory):
    """What one process on the CPU found of each scenario in float32."""
    names = [*SCENARIOS, 'float32']
    (found,) = run_ranks(train_scenarios, 0, 'cpu', tmp_path_factory.mktemp('host'), names)
    return found


@pytest.mark.parametrize('scenario', list(SCENARIOS))
@pytest.mark.parametrize('world_size', [0, 2])
def test_scenarios_are_those_of_the_host(on_cards, on_host, world_size, scenario):
    for result in on_cards(world_size):
        expected = on_host[scenario]['weights']
        assert largest_difference(result[scenario]['weights'], expected) < 1e-5


@pytest.mark.parametrize('dtype', list(AUTOCAST))
@pytest.mark.parametrize('world_size', [0, 2])
def test_mixed_precision(on_cards, on_host, world_size, dtype):
    results = [found[dtype] for found in on_cards(world_size)]
    for result in results:
        assert result['wrapper'] == 'DeviceAmpOptimWrapper'
        # 8 bits of bfloat16's mantissa, over 22 iterations.
        difference = largest_difference(result['weights'], on_host['float32']['weights'])
        assert 0 < difference < (0.002 if dtype == 'float16' else 0.01)
        assert largest_difference(result['weights'], results[0]['weights']) == 0.0


@pytest.mark.parametrize('clip', [False, True])
@pytest.mark.parametrize('world_size', [0, 2])
def test_all_ranks_skip_the_step_in_which_one_overflowed(torch_gcu, tmp_path, world_size, clip):
    options = dict(clip_grad=dict(max_norm=0.2)) if clip else {}
    train = partial(overflow, dtype='float16', **options)
    check_skipped(run_ranks(train, world_size, 'gcu', tmp_path, **T20))


def load_from(work_dir, path):
    """Load a checkpoint into a job that validates once; return the weights it holds then."""
    import t20_card

    t20_card.card.set_lose_weights(True)
    cfg = digits_config('gcu', work_dir, **PLAIN, load_from=str(path))
    runner = RUNNERS.build(cfg)
    runner.load_or_resume()
    return weights_of(unwrap_model(runner.model))


def train_both(accelerator, work_dir):
    """Train without what is random, then the example as it is."""
    plain = train(accelerator, work_dir / 'plain', **PLAIN, experiment_name='plain')
    return plain, train(accelerator, work_dir / 'whole', experiment_name='whole')


@pytest.fixture(scope='module')
def digits(torch_gcu, tmp_path_factory):
    """For a number of ranks: what each found on its card of both trainings."""
    folder = tmp_path_factory.mktemp('digits')

    @lru_cache(maxsize=None)
    def of(world_size):
        return run_ranks(train_both, world_size, 'gcu', folder / str(world_size), **T20)

    return of


@pytest.fixture(scope='module')
def plain_on_host(tmp_path_factory):
    """The weights of one process on the CPU, without what is random."""
    return run_ranks(train_plain, 0, 'cpu', tmp_path_factory.mktemp('plain'))[0]['weights']


@pytest.mark.parametrize('world_size', [0, 2])
def test_weights_are_loaded_into_a_model_that_was_never_computed(
    torch_gcu, tmp_path, plain_on_host, world_size
):
    path = tmp_path / 'last.pth'
    torch.save(dict(state_dict={k: torch.as_tensor(v) for k, v in plain_on_host.items()}), path)
    for weights in run_ranks(load_from, world_size, tmp_path, path, **T20):
        assert largest_difference(weights, plain_on_host) == 0.0


@pytest.mark.parametrize('world_size', [0, 2, 8])
def test_digits(digits, world_size):
    results = [whole for _, whole in digits(world_size)]
    assert results[0]['accuracy'] >= 97.0
    for rank, result in enumerate(results):
        assert result['device'] == f'xla:{rank}'
        assert result['staged'] == bool(world_size)
        assert result['calls']['sync_lived_tensor'] > 0


@pytest.mark.parametrize('world_size', [0, 2, 8])
def test_weights_are_those_of_the_host(digits, plain_on_host, world_size):
    for plain, _ in digits(world_size):
        assert largest_difference(plain['weights'], plain_on_host) < 1e-4


def test_an_iteration_is_one_execution(digits):
    ((plain, _),) = digits(0)
    iterations = ITERATIONS * PLAIN['train_cfg__max_epochs'] + VALIDATION_ITERATIONS
    # Nothing reads a value that is still to be computed: no `item`, no `copy to host`.
    assert set(plain['executions']) <= {'sync_lived_tensor', 'unlazy'}
    assert sum(plain['executions'].values()) <= iterations + 3
    assert plain['compilations'] <= 6


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


def import_writer():
    """Import the TensorBoard writer with what setuptools 59.6 and later leave out."""
    import distutils
    from importlib import import_module

    import setuptools  # noqa: F401  PyTorch asks it for distutils

    from mmdevplug import init_device

    sys.modules.pop('distutils.version', None)
    vars(distutils).pop('version', None)
    with pytest.raises(AttributeError, match="'distutils' has no attribute 'version'"):
        import_module('torch.utils.tensorboard')
    init_device('none', 'cpu')
    return import_module('torch.utils.tensorboard').SummaryWriter.__name__


def test_the_tensorboard_writer_can_be_imported_with_any_setuptools():
    pytest.importorskip('tensorboard')
    assert run_ranks(import_writer, 0) == ['SummaryWriter']


def test_hooks_attributes_and_references_survive_a_move():
    (expected,) = run_ranks(gradients_of_hooked, 0, 'cpu')
    (found,) = run_ranks(gradients_of_hooked, 0, 'gcu', **T20)
    for one, other in zip(expected, found):
        assert one is other is None or torch.allclose(torch.tensor(one), torch.tensor(other))
