"""A model of each further library of OpenMMLab: the losses of MMEngine's own runner, and ours.

``tools/compat.sh openmmlab`` makes an environment that has all of these libraries and runs this
file there.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.jobs import largest_difference
from tests.ranks import run_ranks
from tests.repos.more_recipes import RECIPES
from tests.repos.training import ITERATIONS, train_by

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope='module', params=RECIPES)
def name(mmcv_operators, request):
    library, _ = RECIPES[request.param]
    if find_spec(library) is None:
        pytest.skip(f'{library} is not installed')
    return request.param


@pytest.fixture(scope='module')
def recipe(name, tmp_path_factory):
    library, make = RECIPES[name]
    return replace(
        make(tmp_path_factory.mktemp('data')), modules=(f'{library}.utils', 'tests.repos.metrics')
    )


@pytest.fixture(scope='module')
def alone(name, recipe, tmp_path_factory):
    """What a single process found, with each runner."""
    folder = tmp_path_factory.mktemp('alone')
    (found,) = run_ranks(train_by, 0, ('stock', 'cpu', 'zeta'), recipe, folder, timeout=600)
    return found


@pytest.fixture(scope='module')
def two_ranks(name, recipe, tmp_path_factory):
    """What each of two ranks found, with each runner."""
    if name.startswith('mmyolo'):
        pytest.skip("MMEngine's wrapper refuses YOLOv5's synchronized layers on the CPU")
    folder = tmp_path_factory.mktemp('ranks')
    return run_ranks(train_by, 2, ('stock', 'cpu', 'zeta'), recipe, folder, timeout=600)


def difference(found, accelerator):
    """The largest difference of a loss between MMEngine's runner and ours, relative above 1."""
    steps = list(zip(found['stock']['losses'], found[accelerator]['losses']))
    assert len(steps) == ITERATIONS
    assert all(stock.keys() == ours.keys() for stock, ours in steps)
    return max(abs(a[key] - b[key]) / max(abs(a[key]), 1) for a, b in steps for key in a)


def check_metrics(found, accelerator, tolerance):
    """The validation at the end has the results of MMEngine's own runner."""
    stock, ours = found['stock']['metrics'], found[accelerator]['metrics']
    assert stock
    assert ours == pytest.approx(stock, rel=tolerance, abs=tolerance, nan_ok=True)


def test_losses_are_those_of_mmengine_on_the_cpu(alone):
    losses = [step['loss'] for step in alone['stock']['losses']]
    assert len(set(losses)) == ITERATIONS  # the model learns something
    assert difference(alone, 'cpu') == 0
    check_metrics(alone, 'cpu', 0)
    assert largest_difference(alone['cpu']['weights'], alone['stock']['weights']) == 0


def test_losses_are_those_of_mmengine_on_the_card(alone):
    assert alone['zeta']['device'] == 'zeta:0'
    assert alone['stock']['device'] == 'cpu'
    assert difference(alone, 'zeta') <= 1e-3
    check_metrics(alone, 'zeta', 0.05)


def test_losses_of_two_ranks_are_those_of_mmengine_on_the_cpu(two_ranks):
    for found in two_ranks:
        assert difference(found, 'cpu') == 0
        check_metrics(found, 'cpu', 0)


def test_losses_of_two_ranks_are_those_of_mmengine_on_the_card(two_ranks):
    for rank, found in enumerate(two_ranks):
        assert found['zeta']['device'] == f'zeta:{rank}'
        assert difference(found, 'zeta') <= 1e-3
        check_metrics(found, 'zeta', 0.05)
