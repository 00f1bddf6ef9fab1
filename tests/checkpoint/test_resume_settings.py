"""Each setting of optimizer and schedule is changed, and training resumes with either choice."""

import pytest

from mmdevplug.errors import CheckpointError
from tests.checkpoint.changed_settings import (
    CASES,
    LONGER,
    LONGER_AND_OTHER,
    OTHER_SCHEDULES,
    PLATEAU,
    Case,
    plan,
    resumed,
    run,
    trained,
)


def check(found, whole, stop):
    """Compare with a training that had this config from the beginning, bit for bit."""
    assert found == {number: whole[number] for number in found}
    assert sorted(found) == list(range(stop, max(whole) + 1))


@pytest.mark.parametrize('name', CASES)
def test_the_config_is_taken(folder, tmp_path, name):
    case = CASES[name]
    found, said = resumed(folder, tmp_path, case, 'config')
    check(found, trained(tmp_path / 'whole', case.after), case.stop)
    assert len(said) == 1
    assert all(each.format('', '(taken)').replace(' ,', ',') in said[0] for each in case.said)
    assert '(taken), config' not in said[0]


@pytest.mark.parametrize('name', CASES)
def test_the_checkpoint_is_taken(folder, tmp_path, name):
    case = CASES[name]
    found, said = resumed(folder, tmp_path, case, 'checkpoint')
    check(found, trained(tmp_path / 'whole', case.before), case.stop)
    assert len(said) == 1
    assert all(each.format('(taken)', '').rstrip() in said[0] for each in case.said)
    assert '--resume-settings config' in said[0]


@pytest.mark.parametrize('choice', ['checkpoint', 'config'])
@pytest.mark.parametrize('name', LONGER)
def test_defaults_follow_a_longer_run(folder, tmp_path, name, choice):
    case = LONGER[name]
    found, said = resumed(folder, tmp_path, case, choice)
    check(found, trained(tmp_path / 'whole', case.kept), case.stop)
    assert len(said) == 1
    assert all(each in said[0] for each in case.said)


@pytest.mark.parametrize('name', OTHER_SCHEDULES)
def test_other_schedulers_are_refused_or_the_configs_taken(folder, tmp_path, name):
    case = OTHER_SCHEDULES[name]
    with pytest.raises(CheckpointError, match='--resume-settings config'):
        resumed(folder, tmp_path, case, 'checkpoint')
    found, said = resumed(folder, tmp_path, case, 'config')
    check(found, trained(tmp_path / 'whole', case.after), case.stop)
    assert len(said) == 1
    assert all(each in said[0] for each in case.said)


@pytest.mark.parametrize('name', LONGER_AND_OTHER)
def test_a_longer_run_with_the_settings_of_the_checkpoint(folder, tmp_path, name):
    case = LONGER_AND_OTHER[name]
    found, said = resumed(folder, tmp_path, case, 'checkpoint')
    check(found, trained(tmp_path / 'whole', case.kept), case.stop)
    assert all(each in said[0] for each in case.said)
    # OneCycleLR cannot go on, which a second warning says.
    assert len(said) == (2 if name == 'steps_of_a_cycle' else 1)
    whole = trained(tmp_path / 'config', case.after)
    check(resumed(folder, tmp_path, case, 'config')[0], whole, case.stop)


@pytest.mark.parametrize('stop', [8, 20])
def test_a_longer_run_whose_schedule_ends_before_says_so(folder, tmp_path, stop):
    """MMEngine would train on with the last rate."""
    before = plan(dict(type='CosineAnnealingLR', T_max=4, end=4))
    case = Case(before, dict(before, length=6), [], stop=stop)
    found, said = resumed(folder, tmp_path, case, 'checkpoint')
    assert len({found[number][0]['lr'] for number in range(20, 30)}) == 1
    assert 'max_epochs: checkpoint 4, config 6 (taken)' in said[0]
    assert 'end before (CosineAnnealingLR with end=4)' in said[1]


@pytest.mark.parametrize('choice', ['checkpoint', 'config'])
def test_a_longer_run_whose_rate_rises_again_says_so(folder, tmp_path, choice):
    """As with a config that names the number of epochs twice."""
    before = plan(dict(type='CosineAnnealingLR', T_max=4))
    case = Case(before, dict(before, length=6), [], stop=20)
    found, said = resumed(folder, tmp_path, case, choice)
    rates = [found[number][0]['lr'] for number in (20, 25)]
    assert float(rates[0]) < float(rates[1])
    assert 'CosineAnnealingLR with T_max=4 has its lowest rate before' in said[1]
    assert 'the learning rate rises again' in said[1]


def test_what_a_metric_has_done_stays(folder, tmp_path):
    rates = {}
    for choice in ('checkpoint', 'config'):
        found, said = resumed(folder, tmp_path, PLATEAU, choice)
        assert len(said) == 1
        assert all(each in said[0] for each in PLATEAU.said)
        rates[choice] = [float(found[number][0]['lr']) for number in sorted(found)]
    # The rate was halved twice in the three epochs before.
    assert rates['checkpoint'] == [0.005, 0.005]
    assert rates['config'] == [0.025, 0.025]


def test_a_finished_run_says_so_or_becomes_longer(tmp_path):
    case = LONGER['longer_poly']
    run(tmp_path / 'first', case.before)
    path = tmp_path / 'first' / 'epoch_4.pth'
    found, said = run(tmp_path / 'second', case.before, path)
    assert not found
    assert 'nothing is left to train' in said[0]
    found, said = run(tmp_path / 'longer', case.after, path)
    check(found, trained(tmp_path / 'whole', case.after), 20)
    assert len(said) == 1
