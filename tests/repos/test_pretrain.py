"""mmpretrain's own configs, inherited with a base config of ours, on every kind of device.

What they are compared with is mmpretrain on MMEngine's own runner, in one process on the CPU, with
the whole batch.
"""

import pytest

from tests.columns import device_of, job_of
from tests.jobs import largest_difference, load_file
from tests.ranks import run_ranks
from tests.repos.imagenet import make_imagenet, resnet18, vision_transformer
from tests.repos.training import ITERATIONS, mean_losses, run_tools_train, train_all, write_config

# mmpretrain needs torchvision, which is where torch_xla is.
pytestmark = [pytest.mark.xla, pytest.mark.long, pytest.mark.timeout(600)]

MODELS = dict(resnet18=resnet18, vit=vision_transformer)


@pytest.fixture(scope='module')
def recipes(tmp_path_factory):
    root = make_imagenet(tmp_path_factory.mktemp('imagenet'))
    return {name: recipe(root) for name, recipe in MODELS.items()}


@pytest.mark.parametrize(
    ('accelerator', 'ranks'), [('cpu', 2), ('zeta', 2), ('xla', 0), ('xla', 2), ('gcu', 2)]
)
def test_trains_as_one_process(recipes, stock, tmp_path, accelerator, ranks):
    job = dict(job_of(accelerator, ranks), timeout=580)
    results = run_ranks(train_all, ranks, recipes, accelerator, tmp_path, **job)
    for name in recipes:
        expected = mean_losses([stock], name)
        assert len(expected) == ITERATIONS
        losses, resumed = (mean_losses(results, name, key) for key in ('losses', 'resumed'))
        assert losses == pytest.approx(expected, abs=1e-3)
        assert resumed == pytest.approx(losses[ITERATIONS // 2 :], abs=1e-4)
        for rank, found in enumerate(result[name] for result in results):
            assert found['device'] == device_of(accelerator, rank, ranks)
            assert found['files'] == ['epoch_1.pth', 'epoch_2.pth']
            assert largest_difference(found['weights'], stock[name]['weights']) <= 5e-3
            assert set(found['metrics']) == {'accuracy/top1', 'accuracy/top5'}
            assert found['metrics'] == pytest.approx(stock[name]['metrics'])
            assert found['tested'] == found['metrics']


@pytest.mark.parametrize('accelerator', ['cpu', 'xla'])
def test_tools_train_of_mmpretrain_itself(recipes, stock, tmp_path, accelerator):
    config = write_config(tmp_path / 'config.py', recipes['vit'], accelerator)
    # Its defaults are kept: workers that stay, and memory that is pinned where it can be.
    options = [f'{kind}_dataloader.num_workers=1' for kind in ('train', 'val', 'test')]
    job = dict(job_of(accelerator), timeout=580)
    run_ranks(run_tools_train, 2, 'mmpretrain', config, tmp_path / 'work', *options, **job)
    saved = load_file(tmp_path / 'work' / 'epoch_2.pth')['state_dict']
    assert largest_difference(saved, stock['vit']['weights']) <= 5e-3
