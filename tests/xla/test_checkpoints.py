"""Checkpoints on lazy devices: resumed there, and taken from one kind of device to another."""

from functools import partial

import pytest

from tests.checkpoint.training import build, train
from tests.jobs import largest_difference
from tests.ranks import RanksFailed, in_ranks, run_ranks
from tests.xla.executions import cost_of, train_counted

pytestmark = pytest.mark.xla

EVERY_THIRD = dict(interval=3, by_epoch=False)
#: Dropout draws other numbers on other devices.
MODEL = dict(type='NoisyModel', dropout=0.0)
TWO_DEVICES = dict(CPU_NUM_DEVICES='2')


def run(world_size, work_dir, **options):
    options = dict(dict(by_epoch=False, checkpoint=EVERY_THIRD), **options)
    return run_ranks(partial(train, **options), world_size, work_dir, environ=TWO_DEVICES)


def interrupted(world_size, work_dir, first, second, die_at=10, **options):
    """Train on one device until a rank dies, and go on on another."""
    with pytest.raises(RanksFailed):
        run(
            world_size,
            work_dir,
            accelerator=first,
            custom_hooks=[
                dict(type='EMAHook', momentum=0.1),
                dict(type='DieAt', iteration=die_at),
            ],
            **options,
        )
    return run(world_size, work_dir, accelerator=second, resume=True, **options)


@pytest.mark.parametrize(
    ('world_size', 'async_save', 'die_at'),
    # At 8 the newest checkpoint was saved before the validation after iteration 6; at 10 it may
    # be that one or the next, which the background may still be writing.
    [(0, False, 8), (2, True, 10)],
)
def test_interrupted_and_resumed(tmp_path, world_size, async_save, die_at):
    options = dict(checkpoint=dict(EVERY_THIRD, async_save=async_save))
    whole = run(world_size, tmp_path / 'whole', accelerator='xla', **options)
    again = interrupted(world_size, tmp_path / 'killed', 'xla', 'xla', die_at, **options)
    for expected, found in zip(whole, again):
        # With dropout: the state of the device's generator is saved too.
        assert largest_difference(expected['weights'], found['weights']) < 1e-5
        assert largest_difference(expected['ema'], found['ema']) < 1e-5
        assert expected['draws'] == found['draws']
        assert expected['lr'] == found['lr']


@pytest.mark.parametrize(
    ('first', 'second', 'world_size'), [('xla', 'cpu', 0), ('xla', 'cpu', 2), ('cpu', 'xla', 2)]
)
def test_from_one_device_to_another(tmp_path, first, second, world_size):
    # torch_xla keeps the biased variance in the running statistics.
    options = dict(model=dict(MODEL, norm=False))
    whole = run(world_size, tmp_path / 'whole', accelerator='cpu', **options)
    moved = interrupted(world_size, tmp_path / 'moved', first, second, **options)
    for expected, found in zip(whole, moved):
        assert largest_difference(expected['weights'], found['weights']) < 1e-4
        assert largest_difference(expected['ema'], found['ema']) < 1e-4
        assert found['iter'] == 24


@pytest.mark.parametrize(
    ('hooks', 'most'),
    # The average of weights is computed with the next iteration, or when it is saved.
    [([], 2), ([dict(type='EMAHook', momentum=0.1)], 3)],
    ids=['plain', 'ema'],
)
@in_ranks(2, environ=TWO_DEVICES)
def test_executions_of_an_iteration_that_saves(tmp_path, hooks, most):
    """Executions of each iteration that saves, and of each that does not."""
    runner = build(
        tmp_path,
        'xla',
        by_epoch=False,
        checkpoint=EVERY_THIRD,
        custom_hooks=hooks,
        val_cfg=None,
        val_dataloader=None,
        val_evaluator=None,
        train_cfg=dict(by_epoch=False, max_iters=24),
    )
    steps, _ = cost_of(train_counted(runner))
    saving = [step for index, step in enumerate(steps, 2) if index % 3 == 0]
    saving, others = saving[2:], [step for index, step in enumerate(steps, 2) if index % 3][4:]
    assert max(saving) <= most
    assert set(others) == {2}


def test_averages_of_weights_that_do_not_change_yet(tmp_path):
    options = dict(model=dict(MODEL, norm=False), optim_wrapper__accumulative_counts=4)
    (expected,) = run(0, tmp_path / 'cpu', accelerator='cpu', **options)
    (found,) = run(0, tmp_path / 'xla', accelerator='xla', **options)
    assert largest_difference(expected['weights'], found['weights']) < 1e-4
    assert largest_difference(expected['ema'], found['ema']) < 1e-4
