"""Each part of MMEngine with a state trains, is interrupted twice, and ends with the same bits."""

from itertools import cycle
from types import SimpleNamespace

import pytest
from mmengine.dist import get_rank
from torch import nn

from mmdevplug.checkpoint.participants import Participants, RankBuffers
from mmdevplug.checkpoint.reading import read_checkpoint
from tests.checkpoint.kept_cases import KEPT
from tests.checkpoint.resume_cases import (
    COUNTING,
    OF_SEVERAL_RANKS,
    OTHERS,
    SCHEDULES,
    optimizers,
    scheduled,
)
from tests.checkpoint.resuming import differences, quickly, start
from tests.jobs import log_of, start as start_ranks
from tests.ranks import in_ranks


def _pairs():
    """Each schedule in each way to count, and each optimizer, in few pairs."""
    others = cycle(optimizers())
    return [
        (kind, next(others), counting)
        for counting in COUNTING
        for kind in SCHEDULES
        if counting == 'epochs' or kind != 'ReduceOnPlateau'  # which is by epoch alone
    ]


@pytest.mark.parametrize(('kind', 'optimizer', 'counting'), _pairs())
def test_schedules_and_optimizers(tmp_path, kind, optimizer, counting):
    assert differences(tmp_path, scheduled(kind, optimizer, counting)) is None


@pytest.mark.parametrize('name', OTHERS)
def test_everything_else_with_a_state(tmp_path, name):
    assert differences(tmp_path, OTHERS[name]) is None


@pytest.mark.parametrize('by_epoch', [True, False])
def test_after_loading_other_weights(tmp_path, by_epoch):
    options = scheduled('MultiStep', 'AdamW', COUNTING[0 if by_epoch else 1])
    with quickly():
        start(tmp_path / 'other', dict(options, randomness=dict(seed=8)))
    path = (tmp_path / 'other' / 'last_checkpoint').read_text()
    assert differences(tmp_path, dict(options, load_from=path)) is None
    # It did begin with these weights.
    loaded = read_checkpoint(str(tmp_path / 'whole' / 'epoch_4.pth')) if by_epoch else None
    assert loaded is None or loaded['meta']['epoch'] == 4


#: Those of which the ranks' data, buffers and hooks differ most from those of one.
FEW = (
    'multi_step',
    'ema_exponential',
    'default_sampler_by_iter',
    'plain',
    'zipped',
    'participant',
)


@pytest.mark.parametrize(
    'names',
    [FEW, pytest.param(sorted({*OF_SEVERAL_RANKS} - {*FEW}), marks=pytest.mark.long)],
    ids=['few', 'others'],
)
@in_ranks(2, timeout=900)
def test_two_ranks(tmp_path, names):
    """Many trainings one after the other, in one job of two processes."""
    cases = dict(KEPT, **OF_SEVERAL_RANKS)
    found = {name: differences(tmp_path / name, cases[name]) for name in names}
    assert not {name: what for name, what in found.items() if what is not None}


@pytest.mark.parametrize('name', KEPT)
def test_plain_attributes_and_every_loader(tmp_path, name):
    assert differences(tmp_path, KEPT[name]) is None


@pytest.mark.parametrize('momentum', [0.0, 0.1])
def test_weights_outside_of_the_model_that_change_are_named(tmp_path, momentum):
    options = dict(
        model=dict(type='HidesTeacher'),
        custom_hooks=[dict(type='Teacher', momentum=momentum)],
        checkpoint=dict(interval=1),
    )
    with quickly():
        start(tmp_path, options)
    named = 'hook Teacher/1.teacher.weights and buffers (HidesTeacher)'
    log = log_of(tmp_path)
    assert (log.count(named), log.count('weights and buffers')) == ((1, 1) if momentum else (0, 0))


@in_ranks(2)
def test_buffers_of_another_model_are_left_as_they_are():
    start_ranks()
    saved, found = nn.BatchNorm1d(2), nn.BatchNorm1d(3)
    buffers = RankBuffers(SimpleNamespace(model=found, hooks=[]))
    buffers.load_state_dict(RankBuffers(SimpleNamespace(model=saved, hooks=[])).state_dict())
    said = 'the model has other buffers than the checkpoint'
    assert buffers.inexact == (said if get_rank() else '')  # those of rank 0 are among the weights
    assert found.running_mean.tolist() == [0, 0, 0]


def test_what_hooks_do_twice_is_undone_in_states_that_they_hold():
    counts = []
    hook = SimpleNamespace(
        state_dict=lambda: dict(counts=counts),
        load_state_dict=lambda state: counts.__setitem__(slice(None), state['counts']),
    )
    participants = Participants()
    participants.add('hook', hook)
    restore = participants.keep()
    counts.append(1)
    restore()
    assert counts == []
