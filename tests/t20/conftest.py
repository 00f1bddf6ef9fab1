"""The stand-in for a T20 on PyTorch 1.10, for the tests of this folder."""

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / 'standins' / 't20'

#: Why the stand-in cannot be had here; None where it can.
MISSING = None
if not torch.__version__.startswith('1.10.'):
    MISSING = f'the T20 runs PyTorch 1.10, this is {torch.__version__}: make test-t20'

#: The marks of tests whose jobs import it.
ON_T20 = [pytest.mark.t20, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.fixture(scope='session')
def torch_gcu():
    """Import the stand-in. What it replaces in PyTorch stays replaced until the process ends."""
    if MISSING:
        pytest.skip(MISSING)
    sys.path.insert(0, str(FOLDER))
    import torch_gcu

    return torch_gcu


@pytest.fixture
def card(torch_gcu):
    """The card, with nothing counted and nothing pending."""
    import t20_card

    for index in range(t20_card.card.device_count()):
        t20_card.card.execute_all(index, 'before the test')
    t20_card.card.reset_stats()
    t20_card.calls.clear()
    t20_card.modes.clear()
    torch_gcu.set_device(0)
    yield t20_card.card
    t20_card.card.set_narrow(False)
    t20_card.card.set_lose_weights(False)
