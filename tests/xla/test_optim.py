"""Clipping, mixed precision and accumulation on lazy devices: results, and what they cost."""

import numpy as np
import pytest
from mmengine.registry import RUNNERS

from tests.jobs import largest_difference
from tests.optim.scenarios import SCENARIOS, cast_inside, config, train, train_all
from tests.ranks import errors_of_ranks, run_ranks
from tests.xla.executions import cost_of, train_counted
from tests.xla.t20 import on_t20

pytestmark = pytest.mark.xla


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
    (found,) = run_ranks(train_all, 0, 'cpu', tmp_path_factory.mktemp('single'))
    return found


@pytest.fixture(scope='module', params=[('xla', 0), ('xla', 2), ('gcu', 2)])
def found(request, tmp_path_factory):
    accelerator, ranks = request.param
    folder = tmp_path_factory.mktemp(accelerator)
    return run_ranks(
        on_t20, ranks, train_all, accelerator, folder, environ=dict(CPU_NUM_DEVICES='2')
    )


@pytest.mark.parametrize('scenario', SCENARIOS)
def test_weights_equal_those_of_one_process_on_the_cpu(expected, found, scenario):
    for result in found:
        assert result[scenario]['wrapper'] == 'DeviceOptimWrapper'
        difference = largest_difference(result[scenario]['weights'], expected[scenario]['weights'])
        assert difference <= 1e-5


def test_bfloat16_comes_close_to_one_process_on_the_cpu(expected, found):
    for result in found:
        assert result['bfloat16']['wrapper'] == 'DeviceAmpOptimWrapper'
        difference = largest_difference(
            result['bfloat16']['weights'], expected['bfloat16']['weights']
        )
        assert 1e-5 < difference <= 5e-3


@pytest.mark.parametrize('scenario', [name for name in SCENARIOS if name != 'clip_by_value'])
def test_logged_norm_is_that_of_its_iteration(expected, found, scenario):
    norms = [result[scenario]['norms'] for result in found]
    if scenario == 'accumulation':
        assert norms[0] is None
        return
    assert len(norms[0]) == (6 if 'accumulation' in scenario else 22)
    np.testing.assert_allclose(norms[0], expected[scenario]['norms'], rtol=1e-4)
    for other in norms[1:]:
        np.testing.assert_array_equal(other, norms[0])


def count_executions(accelerator, work_dir, optim_wrapper, **options):
    """Executions and compilations of each iteration, with everything on that costs some."""
    cfg = config(accelerator, work_dir, optim_wrapper, **options)
    cfg.custom_hooks = [dict(type='EMAHook')]
    runner = RUNNERS.build(cfg)
    counted = train_counted(runner)
    assert len(runner.message_hub.get_scalar('train/grad_norm').data[0]) >= 11
    return cost_of(counted[6:])


EVERYTHING = dict(type='AmpOptimWrapper', dtype='bfloat16', clip_grad=dict(max_norm=0.2))


@pytest.mark.parametrize(
    ('accelerator', 'ranks', 'counts'), [('xla', 0, 2), ('xla', 2, 1), ('gcu', 2, 2)]
)
def test_executions_with_everything_on(tmp_path, accelerator, ranks, counts):
    # Clipping, mixed precision, accumulation, averaged weights, a schedule, a log line each time.
    optim_wrapper = dict(EVERYTHING, accumulative_counts=counts)
    for executions, compilations in run_ranks(
        on_t20, ranks, count_executions, accelerator, tmp_path, optim_wrapper,
        environ=dict(CPU_NUM_DEVICES='2'),
    ):  # fmt: skip
        assert len(executions) >= 15
        # Without averaging one is enough, also for an iteration that only accumulates.
        assert set(executions) == ({1} if ranks == 0 else {2} if counts == 1 else {1, 2})
        assert compilations == 0


def test_an_optimizer_with_states_reads_nothing_from_the_device(tmp_path):
    optim_wrapper = dict(clip_grad=dict(max_norm=0.2), optimizer=dict(type='AdamW', lr=0.01))
    ((executions, compilations),) = run_ranks(count_executions, 0, 'xla', tmp_path, optim_wrapper)
    assert set(executions) == {1}
    assert compilations == 0


def overflow(accelerator, work_dir):
    optim_wrapper = dict(type='AmpOptimWrapper', loss_scale=dict(init_scale=256.0))
    return train(
        accelerator, work_dir, optim_wrapper, watch=True,
        train_cfg__max_epochs=1, model__type='OverflowingClassifier',
    )  # fmt: skip


def test_a_scaler_costs_no_execution_where_averages_pass_through_the_host(tmp_path):
    optim_wrapper = dict(type='AmpOptimWrapper', dtype='float16', clip_grad=dict(max_norm=0.2))
    for executions, compilations in run_ranks(
        on_t20, 2, count_executions, 'gcu', tmp_path, optim_wrapper,
        environ=dict(CPU_NUM_DEVICES='2'),
    ):  # fmt: skip
        assert set(executions) == {2}
        assert compilations == 0


def test_all_ranks_skip_the_step_in_which_one_overflowed(tmp_path):
    # The T20's own precision is float16, and the vendor's scaler goes with it.
    first, second = run_ranks(on_t20, 2, overflow, 'gcu', tmp_path)
    for result in (first, second):
        assert result['unchanged'] == [5]
        assert result['scales'] == [256.0] * 5 + [128.0] * 6
    assert largest_difference(first['weights'], second['weights']) == 0.0


def test_float16_without_a_scaler_is_refused(tmp_path):
    errors = errors_of_ranks(
        train, 2, 'xla', tmp_path, dict(type='AmpOptimWrapper', dtype='float16'),
        environ=dict(CPU_NUM_DEVICES='2'), together=True,
    )  # fmt: skip
    for kind, message in errors.values():
        assert kind == 'AcceleratorError'
        assert 'bfloat16' in message


@pytest.mark.parametrize(('accelerator', 'own'), [('xla', 'bfloat16'), ('gcu', 'float16')])
def test_autocast_inside_a_model(tmp_path, accelerator, own):
    (found,) = run_ranks(on_t20, 0, cast_inside, accelerator, tmp_path)
    assert found == [
        f'torch.{name}' for name in (own, 'float32', 'bfloat16', 'bfloat16', 'float32')
    ]


def shard_optimizer(work_dir):
    optimizer = dict(type='ZeroRedundancyOptimizer', optimizer_type='Adam', lr=0.01)
    return train('xla', work_dir, dict(optimizer=optimizer))


def test_sharded_optimizer_is_refused_on_a_lazy_device(tmp_path):
    errors = errors_of_ranks(
        shard_optimizer, 2, tmp_path, environ=dict(CPU_NUM_DEVICES='2'), together=True
    )
    for kind, message in errors.values():
        assert kind == 'ModelError'
        assert "optimizer=dict(type='Adam'" in message
