"""mmpretrain's own configs with one line of ours, on every device."""

import pytest

from tests.distributed import run_ranks
from tests.repos.imagenet import make_imagenet, resnet18, vision_transformer
from tests.repos.training import ITERATIONS, mean_losses, train_all

# mmpretrain needs torchvision, which is where torch_xla is.
pytestmark = [pytest.mark.xla, pytest.mark.long]

RECIPES = {'resnet18': resnet18, 'vit': vision_transformer}


@pytest.fixture(scope='module')
def recipes(tmp_path_factory):
    root = make_imagenet(tmp_path_factory.mktemp('imagenet'))
    return {name: recipe(root) for name, recipe in RECIPES.items()}


@pytest.fixture(scope='module')
def stock(recipes, tmp_path_factory):
    return run_ranks(train_all, 0, recipes, 'stock', tmp_path_factory.mktemp('stock'))[0]


@pytest.mark.parametrize(
    ('accelerator', 'ranks', 'device'),
    [
        ('cpu', 2, 'cpu'),
        ('xla', 0, 'xla'),
        ('xla', 2, 'xla'),
        ('gcu', 2, 'xla'),
        ('zeta', 2, 'zeta'),
    ],
)
def test_trains_as_stock_in_one_process(recipes, stock, tmp_path, accelerator, ranks, device):
    results = run_ranks(
        train_all, ranks, recipes, accelerator, tmp_path, environ=dict(CPU_NUM_DEVICES='2')
    )
    assert len(results) == max(ranks, 1)
    for name in recipes:
        expected = stock[name]
        assert len(expected['losses']) == ITERATIONS
        assert mean_losses(results, name) == pytest.approx(
            [step['loss'] for step in expected['losses']], abs=1e-3
        )
        for result in (rank[name] for rank in results):
            assert result['device'].split(':')[0] == device
            assert result['files'] == ['epoch_1.pth', 'epoch_2.pth']
            half = result['losses'][ITERATIONS // 2 :]
            for again, before in zip(result['resumed'], half):
                assert again == pytest.approx(before, abs=1e-5)
            assert result['tested'] == pytest.approx(result['metrics'])
            assert result['metrics'] == pytest.approx(expected['metrics'])
