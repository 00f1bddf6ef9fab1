"""Training is refused where it cannot go on, and follows a batch that has changed."""

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.checkpoint.reading import read_checkpoint
from mmdevplug.checkpoint.refuse_resume import optimizer_states
from mmdevplug.errors import CheckpointError
from tests.checkpoint.changed_settings import (
    STEPS,
    Case,
    plan,
    resumed,
    run,
    trained,
)

BASE = plan(STEPS)
EMA = [dict(type='EMAHook', momentum=0.1)]


@pytest.fixture(scope='module')
def best(tmp_path_factory):
    """A training with best checkpoints, by whether they can be resumed."""
    found = {}
    for whole in (False, True):
        work_dir = tmp_path_factory.mktemp('best')
        checkpoint = dict(interval=2, save_best='loss_error', rule='greater')
        checkpoint.update(resumable_best=whole)
        found[whole] = run(work_dir, dict(BASE, checkpoint=checkpoint, validates=True))[0]
        (found[whole, 'path'],) = work_dir.glob('best_*.pth')
    return found


REFUSED = dict(
    optimizer=(
        plan(STEPS, kind='AdamW'),
        'the state of SGD, and optim_wrapper.optimizer of the config is AdamW',
    ),
    groups=(
        plan(STEPS, wrapper=dict(paramwise_cfg=dict(custom_keys={'net.0': dict(lr_mult=0.1)}))),
        r'1 group\(s\) of 8 parameter\(s\) of the optimizer SGD, and the config has 8 group\(s\)',
    ),
)


@pytest.mark.parametrize('choice', ['checkpoint', 'config'])
@pytest.mark.parametrize('name', REFUSED)
def test_other_optimizers_are_refused(folder, tmp_path, name, choice):
    config, said = REFUSED[name]
    with pytest.raises(CheckpointError, match=said) as failed:
        resumed(folder, tmp_path, Case(BASE, config, []), choice)
    assert '--cfg-options load_from=' in str(failed.value)


def test_another_number_of_optimizers_is_refused():
    one = dict(optimizer=dict(param_groups=[], state={}))
    expected = 'a.pth holds one optimizer, and the config has optimizers first, second'
    with pytest.raises(CheckpointError, match=expected):
        optimizer_states(one, ['first', 'second'], 'a.pth')


def test_an_optimizer_with_the_same_settings_is_another(folder, tmp_path):
    """Adam's state lacks what Adamax needs in its first step."""
    case = Case(plan(STEPS, kind='Adam'), plan(STEPS, kind='Adamax'), [])
    with pytest.raises(CheckpointError, match='the state of Adam, and .* is Adamax'):
        resumed(folder, tmp_path, case, 'config')


def test_a_model_of_other_widths_is_refused(folder, tmp_path):
    wide = dict(BASE, model=dict(type='NoisyModel', width=32))
    with pytest.raises(CheckpointError, match=r'shape'):
        resumed(folder, tmp_path, Case(BASE, wide, []), 'config')


# best -------------------------------------------------------------------------------------------


def test_a_best_checkpoint_is_refused_and_a_complete_one_named(best, tmp_path):
    with pytest.raises(CheckpointError) as failed:
        run(tmp_path, BASE, best[False, 'path'])
    said = str(failed.value)
    assert 'holds no optimizer and no param_schedulers' in said
    newest = best[False, 'path'].parent / 'epoch_4.pth'
    assert f'Resume from the newest complete one, {newest};' in said
    assert f'--cfg-options load_from={best[False, "path"]}' in said


def test_nothing_complete_is_left(best, tmp_path):
    path = tmp_path / 'weights.pth'
    torch.save(read_checkpoint(str(best[False, 'path'])), str(path))
    with pytest.raises(CheckpointError, match='There is none in'):
        run(tmp_path / 'x', BASE, path)


def test_a_best_checkpoint_can_be_resumed_if_asked_for(best, tmp_path):
    path = best[True, 'path']
    assert 'epoch_4' not in path.name
    found, said = run(tmp_path, dict(BASE, validates=True), path)
    assert found
    assert not said
    assert found == {number: best[True][number] for number in found}
    assert best[True] == best[False]


@HOOKS.register_module(force=True)
class LoadsWeights(Hook):
    """A user's hook that reads a file of weights while training goes on."""

    def __init__(self, path):
        self.path = path

    def after_train_epoch(self, runner):
        runner.load_checkpoint(self.path)


def test_a_resumed_run_may_load_weights(best, folder, tmp_path):
    hook = dict(type='LoadsWeights', path=str(best[False, 'path']))
    found, said = resumed(
        folder, tmp_path, Case(BASE, dict(BASE, custom_hooks=[hook]), []), 'config'
    )
    assert max(found) == 19
    assert not said


# the batch --------------------------------------------------------------------------------------


SCALED = dict(auto_scale_lr=dict(enable=True, base_batch_size=8))


@pytest.mark.parametrize('choice', ['checkpoint', 'config'])
@pytest.mark.parametrize(
    'schedule',
    [STEPS, dict(type='PolyLR', convert_to_iter_based=True)],
    ids=['by_epoch', 'converted'],
)
def test_rates_are_scaled_as_the_log_says(folder, tmp_path, schedule, choice):
    """Batches of 2 in place of 4, so an epoch has 10 iterations in place of 5."""
    before = dict(plan(schedule), **SCALED)
    after = dict(before, train_dataloader__batch_size=2)
    case = Case(before, after, [], stop=10)
    found, said = resumed(folder, tmp_path, case, choice)
    whole = trained(tmp_path / 'whole', after)
    assert found == {number: whole[number + 10] for number in found}
    assert len(found) == 20
    assert 'lr: checkpoint 0.01, config 0.005 (taken, as auto_scale_lr says)' in said[0]


def test_without_scaling_a_batch_changes_no_rate(folder, tmp_path):
    after = dict(BASE, train_dataloader__batch_size=2)
    found, said = resumed(folder, tmp_path, Case(BASE, after, [], stop=10), 'checkpoint')
    before = trained(tmp_path / 'whole', BASE)
    assert [found[10 * epoch - 10] for epoch in (2, 3)] == [before[10], before[15]]
    assert not said


# hooks ------------------------------------------------------------------------------------------


def test_averages_that_only_one_side_has(folder, tmp_path):
    averaged = dict(BASE, custom_hooks=EMA)
    said = resumed(folder, tmp_path, Case(BASE, averaged, []), 'checkpoint')[1]
    assert 'The config has an EMAHook' in said[0]
    _, said = resumed(folder, tmp_path / 'without', Case(averaged, BASE, []), 'checkpoint')
    assert 'holds averaged weights of an EMAHook, which the config lacks' in said[0]


def test_a_training_without_averages_goes_on_with_the_weights_that_were_trained(folder, tmp_path):
    """The checkpoint has averages in their place."""
    losses = {}
    for name, hooks in dict(averaged=EMA, plain=[]).items():
        config = dict(BASE, custom_hooks=hooks)
        resumed(folder, tmp_path / name, Case(dict(BASE, custom_hooks=EMA), config, []), 'config')
        path = next((tmp_path / name / 'config').glob('epoch_4.pth'))
        losses[name] = read_checkpoint(str(path))
    trained_weights = losses['averaged']['ema_state_dict']
    plain = losses['plain']['state_dict']
    assert all(torch.equal(plain[key], trained_weights[f'module.{key}']) for key in plain)


def test_hooks_with_a_state_begin_anew(folder, tmp_path):
    after = dict(BASE, custom_hooks=[dict(type='Remembers')])
    said = resumed(folder, tmp_path, Case(BASE, after, []), 'checkpoint')[1]
    assert 'begin anew: Remembers/1' in said[0]
