"""A loss that is not finite stops all ranks, if the user asked for that."""

import pytest
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.hooks.memory_jobs import build
from tests.ranks import RanksFailed, run_ranks


@HOOKS.register_module(force=True)
class Spoil(Hook):
    """Makes a logged loss of a rank infinite; gradients stay finite."""

    def __init__(self, iteration, rank):
        self.iteration, self.rank = iteration, rank

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter + 1 == self.iteration and runner.rank == self.rank:
            getattr(runner.model, 'module', runner.model).factor = float('inf')


def train_spoiled(work_dir, accelerator, on_nan):
    hooks = [dict(type='Spoil', iteration=5, rank=1)]
    runner = build(work_dir, accelerator, hooks=hooks, iterations=12, on_nan=on_nan)
    runner.train()
    return runner.iter


def check_all_stop(work_dir, accelerator, environ=None):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_spoiled, 2, work_dir, accelerator, 'stop', environ=environ)
    errors = failed.value.errors
    assert errors[1][0] == 'ModelError'
    message = errors[1][1]
    assert 'rank 1, iteration 5: loss_aux=' in message
    assert 'learning rate lr=0.001' in message
    assert errors[0][0] == 'RankFailedError'
    assert 'rank 1, iteration 5' in errors[0][1]


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_stop_names_rank_iteration_loss_and_learning_rate_on_all_ranks(tmp_path, accelerator):
    check_all_stop(tmp_path, accelerator)


def test_it_is_off_unless_asked_for(tmp_path):
    assert run_ranks(train_spoiled, 2, tmp_path, 'cpu', None) == [12, 12]


def test_skip_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_spoiled, 0, tmp_path, 'cpu', 'skip')
    kind, message, _ = failed.value.errors[0]
    assert kind == 'DevPlugError'
    assert "accelerator.on_nan='skip'" in message
    assert "nonfinite_grads='skip'" in message
