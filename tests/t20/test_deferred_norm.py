"""Layers of synchronized batch normalization that share an exchange, on PyTorch 1.10."""

import numpy as np
import pytest

from tests.model.deferred_norm_nets import NETS
from tests.ranks import run_ranks
from tests.t20.conftest import MISSING
from tests.xla.test_deferred_norm import EXCHANGES, meet_errors, run_all

pytestmark = [pytest.mark.t20, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

#: PyTorch 1.10's autocast knows no other devices than CUDA and the CPU.
LEFT_OUT = {'Autocast'}


def _import_card():
    import sys

    from tests.t20.conftest import FOLDER

    sys.path.insert(0, str(FOLDER))
    import torch_gcu  # noqa: F401


def run_on_cards():
    _import_card()
    return run_all('gcu', LEFT_OUT)


def meet_errors_on_cards():
    _import_card()
    meet_errors('gcu')


@pytest.fixture(scope='module')
def found(torch_gcu):
    return run_ranks(run_on_cards, 2)


@pytest.mark.parametrize('name', sorted(set(NETS) - LEFT_OUT))
def test_results_are_those_of_layers_one_by_one(found, name):
    for result in found:
        (together, exchanges), (one_by_one, more_exchanges) = result[name, 'equal']
        assert exchanges <= more_exchanges
        for key, value in one_by_one.items():
            assert (together[key] is None) == (value is None), key
            if value is not None:
                np.testing.assert_array_equal(together[key], value, err_msg=key)


@pytest.mark.parametrize('name', sorted(set(EXCHANGES) - LEFT_OUT))
def test_number_of_exchanges(found, name):
    assert tuple(count for _, count in found[1][name, 'equal']) == EXCHANGES[name]


def test_errors_and_code_without_torch_functions(torch_gcu):
    run_ranks(meet_errors_on_cards, 2)
