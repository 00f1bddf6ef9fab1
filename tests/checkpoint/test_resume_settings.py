"""Each setting of optimizer and schedule is changed, and training resumes with either choice."""

import pytest
import torch

from tests.checkpoint.changed_settings import CASES, LONGER, resumed, trained


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Holds one interrupted training for each config that a case begins with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp('before')
    torch.set_num_threads(threads)


def check(found, whole, stop):
    """The settings are those of a training that had this config from the beginning, bit for bit."""
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
