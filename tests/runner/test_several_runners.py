"""Several runners, and several trainings of one runner, in one process."""

import os

import pytest
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from torch import distributed as torch_dist

from mmdevplug.accelerators import context_of, device_context, enter_rank_device, rank_context
from mmdevplug.accelerators.backend import group_device
from mmdevplug.accelerators.context import current_accelerator
from mmdevplug.errors import LaunchError
from tests.jobs import PLAIN, digits_config, install_card, largest_difference, trained_weights
from tests.ranks import in_ranks, run_ranks

JOBS = pytest.mark.parametrize(('accelerator', 'ranks'), [('cpu', 2), ('zeta', 2)])


class FailOnce(Hook):
    """Raises after an iteration on all ranks, or at the end of training on the last one.

    Where one rank fails in the middle, the others are in a collective that never completes, and
    their processes end.
    """

    def __init__(self, place):
        self.place = place

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.place == 'after_train_iter' and runner.iter == 3:
            raise ValueError('in after_train_iter')

    def after_train(self, runner):
        last = int(os.environ['RANK']) == int(os.environ['WORLD_SIZE']) - 1
        if self.place == 'after_train' and last:
            raise ValueError('in after_train')


def build(accelerator, work_dir):
    install_card(accelerator)
    cfg = digits_config(accelerator, work_dir, **PLAIN)
    cfg.train_dataloader.batch_size = 64
    cfg.train_cfg.max_epochs = 1
    return RUNNERS.build(cfg)


def train(accelerator, work_dir, *hooks):
    runner = build(accelerator, work_dir)
    for hook in hooks:
        runner.register_hook(hook)
    runner.train()
    assert device_context() is runner.device_context
    return trained_weights(runner)


def train_twice_as_long(accelerator, work_dir):
    runner = build(accelerator, work_dir)
    runner.train()
    iterations = runner.iter
    first = {name: value.copy() for name, value in trained_weights(runner).items()}
    runner.train_loop._max_epochs = 2
    runner.train()
    assert runner.iter == 2 * iterations
    return first, trained_weights(runner)


@JOBS
def test_a_second_train_goes_on(tmp_path, accelerator, ranks):
    results = run_ranks(train_twice_as_long, ranks, accelerator, tmp_path)
    for first, second in results:
        assert largest_difference(first, second) > 0
        assert largest_difference(second, results[0][1]) == 0


def train_several(accelerator, work_dir):
    """Train a runner, another one, two that fail, and one more."""
    errors, weights = [], [train(accelerator, work_dir / 'first')]
    context = device_context()
    weights.append(train(accelerator, work_dir / 'second'))
    assert device_context() is not context
    assert device_context().device == context.device
    for place in ('after_train_iter', 'after_train'):
        try:
            train(accelerator, work_dir / place, FailOnce(place))
        except Exception as error:
            errors.append(f'{type(error).__name__}: {error}')
    return errors, [*weights, train(accelerator, work_dir / 'last')]


@JOBS
def test_runners_after_others_and_failed_ones_compute_the_same(tmp_path, accelerator, ranks):
    results = run_ranks(train_several, ranks, accelerator, tmp_path)
    expected = results[0][1][0]
    for rank, ((in_iteration, at_the_end), weights) in enumerate(results):
        assert [largest_difference(each, expected) for each in weights] == [0, 0, 0]
        assert in_iteration == 'ValueError: in after_train_iter'
        assert at_the_end.startswith('ValueError' if rank == ranks - 1 else 'RankFailedError')
        assert 'in after_train' in at_the_end


@in_ranks(1)
def test_each_runner_keeps_its_context(tmp_path):
    card = build('zeta', tmp_path / 'card')
    host = build('cpu', tmp_path / 'host')
    assert device_context() is host.device_context
    assert current_accelerator() is host.device_context.accelerator
    assert rank_context() is host.device_context
    assert enter_rank_device('zeta')[1] == card.device_context.device
    assert rank_context().device == card.device_context.device  # the newest
    assert context_of(host) is host.device_context  # as a hook asks
    assert context_of(object()) is rank_context()  # a stock runner
    devices = [str(each.device_context.device) for each in (card, host)]
    assert devices == ['zeta:0', 'cpu']


@in_ranks(2)
def test_the_device_follows_a_process_group_that_starts_later():
    """As under a stock runner: a script asks for the device before the process group exists."""
    install_card('zeta')
    assert str(enter_rank_device('zeta')[1]) == 'zeta:0'
    torch_dist.init_process_group('gloo')
    chosen = rank_context()
    assert rank_context() is chosen  # entered once for a process group
    accelerator, device = enter_rank_device()
    assert (accelerator, device) == (chosen.accelerator, chosen.device)
    assert current_accelerator() is accelerator is device_context().accelerator
    assert group_device().type == 'cpu'
    assert device_context().env.rank == torch_dist.get_rank()
    assert str(device) == f'zeta:{torch_dist.get_rank()}'


@in_ranks(1)
def test_a_process_group_that_a_script_made_anew_is_refused(tmp_path):
    runner = build('cpu', tmp_path)
    torch_dist.destroy_process_group()
    torch_dist.init_process_group('gloo')
    for run in (runner.train, runner.val, runner.test):
        with pytest.raises(LaunchError, match='delete destroy_process_group'):
            run()
