"""Samples of an iteration stay as they are, or learning rates follow, on any number of ranks."""

import re

import numpy as np
import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from torch import nn

from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.environments.base import LaunchEnv
from mmdevplug.environments.torchrun import MOST_RANKS
from mmdevplug.errors import DevPlugError, LaunchError, ModelError
from mmdevplug.optim.split_step import SplitCollate, SplitStep
from mmdevplug.runner.global_batch import GlobalBatchKeeper, share_of_job, share_out
from tests.ranks import run_ranks
from tests.runner.global_batches import GLOBAL, LENGTH, STEP, train

#: Sums of the same values in another order.
CLOSE = 2e-6


def options(**given):
    return AcceleratorOptions.from_config(dict(type='cpu', **given))


@pytest.fixture(scope='module')
def full(tmp_path_factory):
    """Weights, and what each iteration saw, of a job of 4 ranks, which MMEngine shares out."""
    found = {}
    for by_epoch in (True, False):
        folder = tmp_path_factory.mktemp('full')
        found[by_epoch] = run_ranks(train, 4, folder, by_epoch)
    return found


def samples_of(ranks):
    """The samples that each iteration has had on all ranks together, in order."""
    seen = [each for _, each in ranks]
    return {
        number: sorted(one for each in seen for part in each[number][0] for one in part)
        for number in seen[0]
    }


def losses_of(ranks):
    return {
        number: np.mean([each[number][2] for _, each in ranks]) for number in sorted(ranks[0][1])
    }


def furthest(one, other):
    return max(
        float(np.abs(one[name] - other[name]).max())
        for name in one
        if not re.search('running|num_batches', name)
    )


# accumulate -------------------------------------------------------------------------------------


@pytest.mark.parametrize('ranks', [1, 2])
@pytest.mark.parametrize('by_epoch', [True, False])
def test_fewer_ranks_train_on_the_same_batches(tmp_path, full, ranks, by_epoch):
    found = run_ranks(train, ranks, tmp_path, by_epoch, None, False, 'accumulate', GLOBAL)
    assert list(found[0][1]) == list(range(LENGTH))
    assert samples_of(found) == samples_of(full[by_epoch])
    # Each part is the batch of one of the four ranks.
    parts = sorted(part for _, seen in found for part in seen[0][0])
    assert parts == sorted(part for _, seen in full[by_epoch] for part in seen[0][0])
    losses, expected = losses_of(found), losses_of(full[by_epoch])
    assert max(abs(losses[n] - expected[n]) for n in expected) <= CLOSE
    assert furthest(found[0][0], full[by_epoch][0][0]) <= CLOSE
    assert [seen[1] for seen in found[0][1].values()] == [
        seen[1] for seen in full[by_epoch][0][1].values()
    ]


@pytest.mark.parametrize('by_epoch', [True, False])
def test_ranks_that_leave_and_join_change_nothing(tmp_path, full, by_epoch):
    """4, 2, 1 and 4 ranks, each in the middle of an epoch."""
    seen, rule = {}, ('accumulate', GLOBAL)
    for ranks, stop in ((4, 2), (2, 5), (1, 7), (4, None)):
        found = run_ranks(train, ranks, tmp_path, by_epoch, stop, bool(seen), *rule)
        seen.update(samples_of(found))
    assert seen == samples_of(full[by_epoch])
    assert furthest(found[0][0], full[by_epoch][0][0]) <= CLOSE


def test_a_number_of_ranks_that_does_not_divide_the_batch_scales_the_rate(tmp_path, full):
    found = run_ranks(train, 3, tmp_path, True, None, False, 'accumulate', GLOBAL)
    assert len(found[0][1]) == 3 * 5  # of 11 samples of a rank, 2 in an iteration
    first = full[True][0][1][0][1]
    assert found[0][1][0][1] == pytest.approx(first * 6 / 8, rel=1e-12)


@pytest.mark.parametrize('accumulated', [1, 2, 5])
def test_accumulation_of_the_config_is_kept(tmp_path, accumulated):
    changes = dict(optim_wrapper__accumulative_counts=accumulated)
    whole = run_ranks(train_with, 4, tmp_path / 'whole', {}, changes)
    given = dict(rule='accumulate', wanted=GLOBAL)
    found = run_ranks(train_with, 2, tmp_path / 'split', given, changes)
    assert furthest(found[0][0], whole[0][0]) <= CLOSE


def train_with(folder, given, changes):
    return train(folder, **given, **changes)


# scale ------------------------------------------------------------------------------------------


def test_rates_follow_the_batch_as_mmengine_scales_them(tmp_path):
    found = run_ranks(train, 2, tmp_path / 'ours', True, None, False, 'scale', GLOBAL)
    scaled = dict(auto_scale_lr=dict(enable=True, base_batch_size=GLOBAL))
    expected = run_ranks(train_with, 2, tmp_path / 'mmengine', {}, scaled)
    assert found[0][1] == expected[0][1]
    assert furthest(found[0][0], expected[0][0]) == 0
    # With both, the rate is multiplied once.
    both = run_ranks(train_with, 2, tmp_path / 'both', dict(rule='scale', wanted=GLOBAL), scaled)
    assert both[0][1] == expected[0][1]


@pytest.mark.parametrize('ranks', [2, 3])
def test_resumed_rates_are_those_of_a_job_that_always_had_these_ranks(tmp_path, ranks):
    changes = dict(train_dataloader__drop_last=False, model=dict(type='NoisyModel', norm=False))
    given = dict(rule='scale', wanted=GLOBAL)
    always = run_ranks(train_with, ranks, tmp_path / 'always', given, changes)
    before = run_ranks(train_with, 4, tmp_path / 'job', dict(given, stop=6), changes)
    after = run_ranks(train_with, ranks, tmp_path / 'job', dict(given, resume=True), changes)
    # Two of four iterations of the second epoch were done: 16 samples, 5 of each of 3 ranks.
    length = len(always[0][1]) // 3
    first = length + 16 // ranks // STEP
    assert min(after[0][1]) == first
    for number, (_, rate, _) in after[0][1].items():
        assert rate == pytest.approx(always[0][1][number][1], rel=1e-9), number
    # No sample of the epoch is left out. Three ranks train twice on four that do not make up a
    # batch, and on the first one, with which the sampler makes their shares equal.
    epoch = sorted(one for n in range(4) for one in samples_of(before)[n])
    second = [one for n in (4, 5) for one in samples_of(before)[n]]
    rest = samples_of(after)
    second += [one for n in range(first, 2 * length) for one in rest[n]]
    assert set(second) == set(epoch)
    assert len(second) - len(epoch) == (0 if ranks == 2 else 5)


def test_a_second_training_does_not_multiply_rates_again():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    keeper = GlobalBatchKeeper(None)
    keeper.share = share_out(options(global_batch=8, global_batch_rule='scale'), 2, 2, None)
    for _ in range(2):
        keeper.scale_lr(OptimWrapper(optimizer), {})
        assert optimizer.param_groups[0]['lr'] == 0.05


def test_a_scheduler_that_follows_a_metric_keeps_its_state(tmp_path):
    changes = dict(
        param_scheduler=[
            dict(type='ReduceOnPlateauLR', monitor='loss_error', patience=0, factor=0.5)
        ],
        train_cfg__val_interval=1,
    )
    given = dict(rule='scale', wanted=GLOBAL)
    before = run_ranks(train_with, 4, tmp_path, dict(given, stop=6), changes)
    after = run_ranks(train_with, 2, tmp_path, dict(given, resume=True), changes)
    assert after[0][1][min(after[0][1])][1] == before[0][1][5][1] / 2


# shares -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('wanted', 'rule', 'step', 'ranks', 'most', 'rank', 'steps', 'factor'),
    [
        (6, 'accumulate', 2, 2, None, 4, 2, 8 / 6),
        (20, 'accumulate', 4, 4, None, 4, 1, 16 / 20),
        (6, 'accumulate', 1, 2, None, 3, 3, 1),
        (36, 'accumulate', 4, 4, None, 9, 3, 1),
        (32, 'accumulate', 4, 8, None, 4, 1, 1),
        (32, 'accumulate', 4, 2, None, 16, 4, 1),
        (32, 'accumulate', 4, 1, None, 32, 8, 1),
        (32, 'accumulate', 4, 16, None, 2, 1, 1),
        (32, 'accumulate', 4, 5, None, 8, 2, 40 / 32),
        (32, 'accumulate', 4, 7, None, 4, 1, 28 / 32),
        (24, 'accumulate', 4, 4, None, 6, 2, 1),
        (30, 'accumulate', 4, 9, None, 3, 1, 27 / 30),
        (32, 'accumulate', 4, 100, None, 1, 1, 100 / 32),
        (32, 'scale', 4, 2, None, 4, 1, 1 / 4),
        (32, 'scale', 4, 16, None, 4, 1, 2),
        (None, 'accumulate', 4, 2, 8, 16, 4, 1),
        (None, 'scale', 4, 2, 8, 4, 1, 1 / 4),
        (None, 'accumulate', 4, 8, 8, 4, 1, 1),
        (64, 'accumulate', 4, 8, 8, 8, 2, 1),
    ],
)
def test_shares(wanted, rule, step, ranks, most, rank, steps, factor):
    share = share_out(options(global_batch=wanted, global_batch_rule=rule), step, ranks, most)
    assert (share.rank, share.steps, share.lr_factor) == (rank, steps, factor)
    assert f'{rank * ranks} samples' in share.describe()
    assert ('learning rates' in share.describe()) == (factor != 1)


def test_without_an_option_everything_is_left_to_mmengine(tmp_path):
    assert share_out(options(), 4, 2, None) is None
    assert share_of_job(options(), dict(batch_size=4), LaunchEnv()) is None
    # What is left of another job in the shell says nothing without its launcher.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MOST_RANKS, '8')
        assert share_of_job(options(), dict(batch_size=4), LaunchEnv()) is None
        share = share_of_job(options(), dict(batch_size=4), LaunchEnv('pytorch', world_size=2))
    assert (share.wanted, share.rank) == (32, 16)


@pytest.mark.parametrize('value', [0, -8, 1.5, '8', True])
def test_a_batch_that_is_none_is_refused(value):
    with pytest.raises(DevPlugError, match='accelerator.global_batch='):
        options(global_batch=value)
    with pytest.raises(DevPlugError, match='accelerator.global_batch_rule='):
        options(global_batch_rule=value)


def test_a_loader_that_is_built_already_is_refused_where_its_batches_would_change():
    loader = Runner.build_dataloader(
        dict(
            batch_size=4,
            sampler=dict(type='DefaultSampler', shuffle=False),
            dataset=list(range(8)),
        )
    )
    assert share_of_job(options(global_batch=4), loader, LaunchEnv()).steps == 1
    with pytest.raises(LaunchError, match='batch_size=4 disagree: its batches cannot change'):
        share_of_job(options(global_batch=8), loader, LaunchEnv())


# steps ------------------------------------------------------------------------------------------


def test_parts_are_every_nth_sample():
    collate = SplitCollate(list, 3)
    assert collate([0, 1, 2, 3, 4, 5]) == [[0, 3], [1, 4], [2, 5]]
    assert collate([0, 1, 2, 3]) == [[0, 3], [1], [2]]
    # As samplers fill up the last batch of an epoch.
    assert collate([7, 8]) == [[7], [8], [7]]


class Two(nn.Module):
    """A model with two optimizers, the second of which rests in every other step."""

    def __init__(self, times=1):
        super().__init__()
        self.one, self.other = nn.Linear(2, 1), nn.Linear(2, 1)
        self.times, self.steps = times, 0

    def train_step(self, data, optim_wrapper):
        self.steps += 1
        loss = self.one(data).mean()
        for number in range(self.times if self.steps == 1 else 1):
            optim_wrapper['one'].update_params(loss if number == 0 else self.one(data).mean())
        return dict(loss=loss.detach(), name=f'step {self.steps}')


def wrapper_of(layer, every=1):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    return OptimWrapper(optimizer, accumulative_counts=every)


def test_several_optimizers_count_each_for_itself():
    model = Two()
    wrappers = OptimWrapperDict(one=wrapper_of(model.one), other=wrapper_of(model.other))
    before = model.one.weight.clone()
    data = [torch.ones(1, 2), 3 * torch.ones(1, 2)]
    found = SplitStep(model.train_step, 2)(data, wrappers)
    assert [wrappers[name]._inner_count for name in ('one', 'other')] == [1, 0]
    assert wrappers['one']._accumulative_counts == 1
    # The mean of both parts, in one update.
    assert torch.allclose(before - model.one.weight, 0.1 * 2 * torch.ones(1, 2))
    assert found['name'] == 'step 2'
    assert found['loss'].shape == ()


def test_a_step_that_updates_more_often_for_one_part_is_refused():
    model = Two(times=2)
    wrappers = OptimWrapperDict(one=wrapper_of(model.one), other=wrapper_of(model.other))
    with pytest.raises(ModelError, match='calls update_params.. 3 times for 2 batches'):
        SplitStep(model.train_step, 2)([torch.ones(1, 2)] * 2, wrappers)
