"""Training is refused where it cannot go on, and follows a batch that has changed."""

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.checkpoint.load_model import check_names
from mmdevplug.checkpoint.reading import read_checkpoint
from mmdevplug.errors import CheckpointError
from tests.checkpoint.changed_settings import STEPS, Case, interrupt, plan, resumed, run

BASE = plan(STEPS)
EMA = [dict(type='EMAHook', momentum=0.1)]


@pytest.fixture(scope='module')
def best(tmp_path_factory):
    """A training with best checkpoints, by whether they can be resumed."""
    found = {}
    for whole in (False, True):
        work_dir = tmp_path_factory.mktemp('best')
        checkpoint = dict(interval=2, save_best='loss_error', rule='greater', resumable_best=whole)
        found[whole], _ = run(work_dir, dict(BASE, checkpoint=checkpoint), validates=True)
        (found[whole, 'path'],) = work_dir.glob('best_*.pth')
    return found


@pytest.mark.parametrize('kinds', [True, False], ids=['ours', 'mmengines'])
@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        (dict(kind='AdamW'), 'the state of SGD, and the config has optim_wrapper.optimizer AdamW'),
        (
            dict(wrapper=dict(paramwise_cfg=dict(custom_keys={'net.0': dict(lr_mult=0.1)}))),
            r'1 group\(s\) of 8 parameter\(s\) of the optimizer SGD, and the config '
            r'has 8 group\(s\)',
        ),
    ],
    ids=['optimizer', 'groups'],
)
def test_other_optimizers_are_refused(changes, said, kinds):
    if not kinds:
        said = said.replace('SGD, and the config has optim', 'an optimizer with no state, .*optim')
    for choice in ('checkpoint', 'config'):
        with pytest.raises(CheckpointError, match=said) as failed:
            resumed(Case(BASE, plan(STEPS, **changes), []), choice, kinds)
        assert '--cfg-options load_from=' in str(failed.value)


def test_another_number_of_optimizers_is_refused():
    expected = 'a.pth holds one optimizer, and the config has optimizers first, second'
    with pytest.raises(CheckpointError, match=expected):
        check_names(dict(param_groups=[], state={}), ['first', 'second'], 'a.pth')


def test_an_optimizer_with_the_same_settings_is_another():
    """Adam's state lacks what Adamax needs in its first step."""
    case = Case(plan(STEPS, kind='Adam'), plan(STEPS, kind='Adamax'), [])
    with pytest.raises(CheckpointError, match='the state of Adam, and .* Adamax'):
        resumed(case, 'config')


@pytest.fixture(scope='module')
def interrupted(tmp_path_factory):
    """The checkpoint of an interrupted training, by whether it has averages."""
    return {
        bool(hooks): interrupt(tmp_path_factory.mktemp('before'), dict(BASE, custom_hooks=hooks))
        for hooks in ([], EMA)
    }


def test_a_model_of_other_widths_is_refused(interrupted, tmp_path):
    wide = dict(BASE, model=dict(type='NoisyModel', width=32))
    with pytest.raises(CheckpointError, match=r'shape'):
        run(tmp_path, wide, interrupted[False], choice='config')


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
    found, said = run(tmp_path, BASE, path, validates=True)
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


def test_a_resumed_run_may_load_weights(best, interrupted, tmp_path):
    hook = dict(type='LoadsWeights', path=str(best[False, 'path']))
    found, said = run(tmp_path, dict(BASE, custom_hooks=[hook]), interrupted[False])
    assert max(found) == 19
    assert not said


def test_without_scaling_a_batch_changes_no_rate(best, tmp_path):
    """Batches of 2 in place of 4, so an epoch has 10 iterations in place of 5."""
    after = dict(BASE, train_dataloader__batch_size=2)
    found, said = run(tmp_path, after, best[True, 'path'].parent / 'epoch_2.pth')
    assert [found[number] for number in (10, 20)] == [best[True][number] for number in (10, 15)]
    assert not said


def test_gradients_that_were_not_saved_are_named(tmp_path):
    options = plan(STEPS, wrapper=dict(accumulative_counts=2))
    path = interrupt(tmp_path / 'before', options, stop=7)
    (said,) = run(tmp_path / 'after', options, path)[1]
    assert 'accumulative_counts=2, and gradients of 1 iteration(s) were not saved' in said


# hooks ------------------------------------------------------------------------------------------


def test_averages_that_only_one_side_has(interrupted, tmp_path):
    averaged = dict(BASE, custom_hooks=EMA)
    said = run(tmp_path / 'with', averaged, interrupted[False])[1]
    assert 'The config has an EMAHook' in said[0]
    said = run(tmp_path / 'without', BASE, interrupted[True])[1]
    assert 'holds averaged weights of an EMAHook, which the config lacks' in said[0]
    run(tmp_path / 'averaged', averaged, interrupted[True])
    # The checkpoint has averages in the place of the weights that were trained.
    plain, other = (
        read_checkpoint(str(tmp_path / name / 'epoch_4.pth')) for name in ('without', 'averaged')
    )
    for key, value in plain['state_dict'].items():
        assert torch.equal(value, other['ema_state_dict'][f'module.{key}'])


def test_hooks_with_a_state_begin_anew(interrupted, tmp_path):
    after = dict(BASE, custom_hooks=[dict(type='Remembers')])
    said = run(tmp_path, after, interrupted[False])[1]
    assert 'begin anew: hook Remembers/1' in said[0]
