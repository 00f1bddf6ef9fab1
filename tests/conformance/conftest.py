"""The accelerators that are looked at: the one that was asked for, or the CPU and a stand-in."""

import card
import pytest

from tests.conformance.card import Asked
from tests.jobs import ROOT

STAND_IN = str(ROOT / 'standins' / 'fakecard' / 'zeta_config.py')


def pytest_generate_tests(metafunc):
    """Run each test on what ``--accelerator`` names."""
    if 'asked' not in metafunc.fixturenames:
        return
    name = metafunc.config.getoption('--accelerator')
    mark = pytest.mark.skipif(card.MISSING is not None, reason=str(card.MISSING))
    cards = [Asked('cpu'), pytest.param(Asked('zeta', STAND_IN, True), marks=mark)]
    if name:
        cards = [Asked(name, metafunc.config.getoption('--card-config'))]
    metafunc.parametrize('asked', cards, ids=lambda asked: asked.name)


def pytest_ignore_collect(collection_path, config):
    """Leave out the tests of these tests where a card is looked at."""
    if collection_path.name == 'test_faults.py' and config.getoption('--accelerator'):
        return True
    return None
