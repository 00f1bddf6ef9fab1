"""Each setting of optimizer and schedule is changed, and training resumes with either choice."""

import pytest

from mmdevplug.checkpoint.resume_settings import counted_epochs
from mmdevplug.errors import CheckpointError
from tests.checkpoint.changed_settings import (
    CASES,
    LONGER,
    LONGER_AND_OTHER,
    OTHER_SCHEDULES,
    PLATEAU,
    STEPS,
    TWO,
    Simulated,
    changed_two,
    interrupt,
    plan,
    resumed,
    run,
    trained,
)


def check(found, whole, stop):
    """Compare with a training that had this config from the beginning, bit for bit."""
    assert found == {number: whole[number] for number in found}
    assert sorted(found) == list(range(stop, max(whole) + 1))


def check_case(case, choice, config):
    """Resume with a choice; the settings are those of a config, and the warning says so."""
    found, said = resumed(case, choice)
    check(found, trained(config), case.stop)
    assert all(each in said for each in case.said)


# in simulated trainings -------------------------------------------------------------------------


@pytest.mark.parametrize('kinds', [True, False], ids=['ours', 'mmengines'])
@pytest.mark.parametrize('name', CASES)
def test_either_choice(name, kinds):
    case = CASES[name]
    found, said = resumed(case, 'config', kinds)
    check(found, trained(case.after), case.stop)
    assert all(each.format('', '(taken)').replace(' ,', ',') in said for each in case.said)
    assert '(taken), config' not in said
    found, said = resumed(case, 'checkpoint', kinds)
    check(found, trained(case.before), case.stop)
    assert all(each.format('(taken)', '').rstrip() in said for each in case.said)
    assert 'config' in said
    assert '(taken);' not in said.replace('(taken), config', '')


@pytest.mark.parametrize('choice', ['checkpoint', 'config'])
@pytest.mark.parametrize('name', LONGER)
def test_defaults_follow_a_longer_run(name, choice):
    check_case(LONGER[name], choice, LONGER[name].kept)


@pytest.mark.parametrize('name', LONGER_AND_OTHER)
def test_a_longer_run_with_the_settings_of_the_checkpoint(name):
    case = LONGER_AND_OTHER[name]
    check_case(case, 'checkpoint', case.kept)
    check(resumed(case, 'config')[0], trained(case.after), case.stop)


@pytest.mark.parametrize('name', OTHER_SCHEDULES)
def test_other_schedulers_are_refused_or_the_configs_taken(name):
    case = OTHER_SCHEDULES[name]
    with pytest.raises(CheckpointError, match='--resume-settings config'):
        resumed(case, 'checkpoint')
    check_case(case, 'config', case.after)


@pytest.mark.parametrize('choice', ['checkpoint', 'config'])
@pytest.mark.parametrize(
    'schedule',
    [STEPS, dict(type='PolyLR', convert_to_iter_based=True)],
    ids=['by_epoch', 'converted'],
)
def test_rates_are_scaled_as_the_log_says(schedule, choice):
    """Batches of 2 in place of 4, so an epoch has 10 iterations in place of 5."""
    before, after = Simulated(plan(schedule)), Simulated(plan(schedule, lr=0.01), epoch=10)
    before.train(0, 10)
    said = after.resume(before, 10, choice, scaled=True)
    assert 'lr: checkpoint 0.02, config 0.01 (taken, as auto_scale_lr says)' in said
    whole = Simulated(plan(schedule, lr=0.01), epoch=10).train()
    assert after.train(20) == {number: whole[number] for number in range(20, 40)}


def test_a_scaled_rate_and_other_settings_are_not_mixed():
    before, after = Simulated(plan(STEPS)), Simulated(plan(dict(STEPS, gamma=0.7), lr=0.01))
    before.train(0, 10)
    with pytest.raises(CheckpointError, match='gamma: checkpoint 0.5 .*--resume-settings config'):
        after.resume(before, 10, 'checkpoint', scaled=True)
    after.resume(before, 10, 'config', scaled=True)


def test_what_a_metric_has_done_stays_or_the_resumption_is_refused():
    before, after = Simulated(plan(PLATEAU)), Simulated(plan(PLATEAU, length=6))
    one = before.schedulers[0]
    for loss in (1.0, 2.0, 3.0):  # the first is the best, so the rate is halved twice
        one.step(dict(loss_error=loss))
    for choice in ('checkpoint', 'config'):
        after = Simulated(plan(PLATEAU, length=6))
        after.resume(before, 15, choice)
        assert after.wrapper.get_lr()['lr'] == [0.005]
        assert (after.schedulers[0].best, after.schedulers[0].end) == (1.0, 6)
        other = Simulated(plan(dict(PLATEAU, factor=0.1)))
        if choice == 'config':
            with pytest.raises(CheckpointError, match=r'factor: checkpoint 0.5, config 0.1'):
                other.resume(before, 15, choice)
        else:
            other.resume(before, 15, choice)
            assert other.schedulers[0].factor == 0.5


# in real ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize('choice', ['checkpoint', 'config'])
def test_training_goes_on_with_the_settings_that_are_taken(tmp_path, choice):
    """Two optimizers with schedules of their own."""
    changes = {'optim_wrapper.second.optimizer.lr': 0.03, 'param_scheduler.first.0.gamma': 0.7}
    after = changed_two(**changes)
    path = interrupt(tmp_path / 'before', TWO)
    found, (said,) = run(tmp_path / 'after', after, path, choice=choice)
    whole, _ = run(tmp_path / 'whole', after if choice == 'config' else TWO)
    check(found, whole, 8)
    assert 'optim_wrapper.second.optimizer.lr: checkpoint 0.01' in said
    assert 'param_scheduler.first[0] (MultiStepLR).gamma: checkpoint 0.1' in said
    assert ('--resume-settings config' in said) == (choice == 'checkpoint')


def test_a_finished_run_says_so_or_becomes_longer(tmp_path):
    case = LONGER['longer_poly']
    run(tmp_path / 'first', case.before)
    path = tmp_path / 'first' / 'epoch_4.pth'
    found, said = run(tmp_path / 'second', case.before, path)
    assert not found
    assert 'nothing is left to train' in said[0]
    found, said = run(tmp_path / 'longer', case.after, path)
    check(found, run(tmp_path / 'whole', case.after)[0], 20)
    assert len(said) == 1
    assert 'train_cfg.max_epochs: checkpoint 4, config 6 (taken)' in said[0]


@pytest.mark.parametrize(
    ('saved', 'counted'),
    [
        (dict(counts_epochs=False, cfg='train_cfg = dict(by_epoch=True)'), False),
        (dict(cfg="a = 1\ntrain_cfg = dict(max_iters=9, type='IterBasedTrainLoop')"), False),
        (dict(cfg='train_cfg = dict(\n    by_epoch=True, max_epochs=3)\nb = 2'), True),
        (dict(cfg="train_cfg = dict(type='MyLoop')"), None),
        (dict(cfg='train_cfg = None'), None),
        ({}, None),
    ],
)
def test_whether_a_checkpoint_of_mmengine_counts_epochs(saved, counted):
    assert counted_epochs(saved) is counted
