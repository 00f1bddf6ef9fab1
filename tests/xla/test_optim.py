"""Clipping, mixed precision and accumulation on lazy devices: what they cost, and refusals."""

import pytest
from mmengine.registry import RUNNERS

from mmdevplug.errors import AcceleratorError, ModelError
from tests.columns import job_of
from tests.optim.scenarios import check_skipped, config, overflow, train
from tests.ranks import in_ranks, run_ranks
from tests.xla.executions import cost_of, train_counted

pytestmark = pytest.mark.xla


def count_executions(accelerator, work_dir, optim_wrapper, **options):
    """Executions and compilations of each iteration.

    With averaged weights, a schedule and a line of the log each time, too.
    """
    cfg = config(accelerator, work_dir, optim_wrapper, **options)
    cfg.custom_hooks = [dict(type='EMAHook')]
    runner = RUNNERS.build(cfg)
    counted = train_counted(runner)
    assert len(runner.message_hub.get_scalar('train/grad_norm').data[0]) >= 11
    return cost_of(counted[6:])


CLIPPED = dict(clip_grad=dict(max_norm=0.2))
EVERYTHING = dict(CLIPPED, type='AmpOptimWrapper', dtype='bfloat16')


@pytest.mark.parametrize(
    ('accelerator', 'ranks', 'optim_wrapper', 'expected'),
    [
        # Without averaging one is enough, also for an iteration that only accumulates.
        ('xla', 0, dict(EVERYTHING, accumulative_counts=2), {1}),
        ('xla', 2, EVERYTHING, {2}),
        ('gcu', 2, dict(EVERYTHING, accumulative_counts=2), {1, 2}),
        # States of the optimizer are not read from the device.
        ('xla', 0, dict(CLIPPED, optimizer=dict(type='AdamW', lr=0.01)), {1}),
        # A scaler costs none where averages pass through the host.
        ('gcu', 2, dict(EVERYTHING, dtype='float16'), {2}),
    ],
    ids=['alone', 'ranks', 'accumulation', 'states', 'scaler'],
)
def test_executions_of_an_iteration(tmp_path, accelerator, ranks, optim_wrapper, expected):
    job = job_of(accelerator, ranks)
    for executions, compilations in run_ranks(
        count_executions, ranks, accelerator, tmp_path, optim_wrapper, **job
    ):
        assert len(executions) >= 15
        assert set(executions) == expected
        assert compilations == 0


def test_all_ranks_skip_the_step_in_which_one_overflowed(tmp_path):
    # The T20's own precision is float16, and the vendor's scaler goes with it.
    check_skipped(run_ranks(overflow, 2, 'gcu', tmp_path, **job_of('gcu')))


@in_ranks(2, **job_of('xla'))
def test_float16_without_a_scaler_is_refused(tmp_path):
    with pytest.raises(AcceleratorError, match='bfloat16'):
        train('xla', tmp_path, dict(type='AmpOptimWrapper', dtype='float16'))


@in_ranks(2, **job_of('xla'))
def test_sharded_optimizer_is_refused_on_a_lazy_device(tmp_path):
    optimizer = dict(type='ZeroRedundancyOptimizer', optimizer_type='Adam', lr=0.01)
    with pytest.raises(ModelError, match=r"optimizer=dict\(type='Adam'"):
        train('xla', tmp_path, dict(optimizer=optimizer))
