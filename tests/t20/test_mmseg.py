"""mmseg's own configs on 1, 2 and 8 cards of the stand-in, on the PyTorch that a T20 runs.

Compared with mmseg on MMEngine's own runner, in one process on the CPU, with the whole batch.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.columns import job_of
from tests.jobs import ROOT, load_file
from tests.ranks import run_ranks
from tests.repos.segmentation import deeplabv3plus, make_cityscapes, segformer, vit
from tests.repos.training import ITERATIONS, mean_losses, train_all, write_config
from tests.t20.conftest import FOLDER, ON_T20
from tests.xla.shape_jobs import SIZES, segmentor, validate

pytestmark = [*ON_T20, pytest.mark.timeout(900)]

#: The models for a number of cards; 0 is one process without a launcher. Eight ranks have one
#: picture each, whose mean alone is no statistic of a layer that is not synchronized.
NAMES_ON = {
    0: ('segformer',),
    2: ('segformer', 'deeplabv3plus_per_rank'),
    8: ('vit', 'deeplabv3plus'),
}
CASES = [(name, cards) for cards, names in NAMES_ON.items() for name in names]


def validate_on_many_sizes(work_dir):
    """Predictions on images of many sizes, of the host and of a card."""
    import t20_card
    import torch_gcu
    from mmseg.utils import register_all_modules

    register_all_modules(init_default_scope=False)

    def graphs():
        return t20_card.card.stats(torch_gcu.current_device())['compilations']

    return [
        validate(kind, work_dir, segmentor(), SIZES[:12], graphs=graphs, pad_to=(20, 24))
        for kind in ('cpu', 'gcu')
    ]


@pytest.mark.operators
def test_validation_on_images_of_many_sizes_compiles_one_graph(torch_gcu, tmp_path):
    ((host, card),) = run_ranks(validate_on_many_sizes, 0, tmp_path, **job_of('gcu'))
    assert len({found.shape for found in host['predictions']}) == 12
    for found, expected in zip(card['predictions'], host['predictions']):
        assert (found == expected).all()
    assert card['metrics'] == host['metrics']
    assert card['counts'][0] > 0
    assert card['counts'][1:] == card['counts'][:1] * 11


def with_sync_bn(recipe, how):
    return replace(recipe, changes=dict(recipe.changes, sync_bn=how))


@pytest.fixture(scope='module')
def recipes(mmcv_operators, torch_gcu, tmp_path_factory):
    root = make_cityscapes(tmp_path_factory.mktemp('data') / 'cityscapes')
    models = {recipe.__name__: recipe(root) for recipe in (segformer, vit, deeplabv3plus)}
    return {name: replace(recipe, batch=8) for name, recipe in models.items()}


@pytest.fixture(scope='module')
def ours(recipes):
    """The recipes, with layers that are synchronized and with layers that are not."""
    deeplab = recipes['deeplabv3plus']
    return dict(
        recipes,
        deeplabv3plus=with_sync_bn(deeplab, 'auto'),
        deeplabv3plus_per_rank=with_sync_bn(deeplab, 'per_rank'),
    )


@pytest.fixture(scope='module')
def stock(recipes, tmp_path_factory):
    (found,) = run_ranks(train_all, 0, recipes, 'stock', tmp_path_factory.mktemp('stock'))
    return found


@pytest.fixture(scope='module')
def trained(ours, tmp_path_factory):
    """For a device and a number of ranks: what each rank found of each recipe."""
    found = {}

    def of(accelerator, ranks, names=None):
        names = tuple(names or NAMES_ON[ranks])
        key = (accelerator, ranks, names)
        if key not in found:
            folder = tmp_path_factory.mktemp(f'{accelerator}_{ranks}')
            chosen = {name: ours[name] for name in names}
            found[key] = run_ranks(
                train_all, ranks, chosen, accelerator, folder, timeout=800, **job_of(accelerator)
            )
        return found[key]

    return of


@pytest.fixture(scope='module')
def expected(stock, trained):
    """What one process on the CPU found; with statistics for each rank, that many processes."""

    def of(name, cards):
        if not name.endswith('per_rank'):
            return [stock], name
        if cards == 0:
            return [stock], 'deeplabv3plus'
        return trained('cpu', cards, (name,)), name

    return of


def distance(one, other):
    """Of two states, relative to the second's length.

    The gradient of a bias before a normalization is 0 but for rounding, and AdamW makes steps of
    full length of that: such a weight alone may differ by all its steps.
    """
    assert one.keys() == other.keys()
    pairs = [(torch.as_tensor(one[k]).double(), torch.as_tensor(other[k]).double()) for k in other]
    apart = sum((a - b).square().sum() for a, b in pairs)
    return float((apart / sum(b.square().sum() for _, b in pairs)).sqrt())


every_case = pytest.mark.parametrize(('name', 'cards'), CASES)


@every_case
def test_losses_are_those_of_the_host(trained, expected, cards, name):
    wanted = mean_losses(*expected(name, cards))
    assert len(wanted) == ITERATIONS
    assert wanted[-1] < wanted[0] - 0.1  # there is something to learn
    found = mean_losses(trained('gcu', cards), name)
    # Convolutions add up in another order, and AdamW divides by the root of what is nearly 0.
    assert found[:3] == pytest.approx(wanted[:3], abs=1e-5)
    assert found == pytest.approx(wanted, abs=5e-4)


@every_case
def test_weights_and_statistics_are_those_of_the_host(trained, expected, cards, name):
    ranks, wanted = expected(name, cards)
    for rank, found in enumerate(trained('gcu', cards)):
        there = ranks[rank % len(ranks)][wanted]['weights']
        assert distance(found[name]['weights'], there) <= 1e-3


@every_case
def test_metrics_are_those_of_the_host(trained, expected, cards, name):
    ranks, wanted = expected(name, cards)
    metrics = ranks[0][wanted]['metrics']
    assert set(metrics) == {'aAcc', 'mIoU', 'mAcc'}
    for found in trained('gcu', cards):
        for key, value in metrics.items():
            assert float(found[name]['metrics'][key]) == pytest.approx(value, abs=0.1)


@every_case
def test_checkpoints(trained, cards, name):
    ranks = trained('gcu', cards)
    whole, resumed = (mean_losses(ranks, name, key) for key in ('losses', 'resumed'))
    assert resumed == pytest.approx(whole[-ITERATIONS // 2 :], abs=1e-6)
    for rank, found in enumerate(ranks):
        assert found[name]['device'] == f'xla:{rank}'
        assert found[name]['files'] == ['iter_5.pth', 'iter_10.pth']
        assert found[name]['tested'] == found[name]['metrics']


def run(*command, **variables):
    """Run a command of the user's in the environment of these tests."""
    environ = {
        **os.environ,
        'PATH': os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']]),
        'PYTHONPATH': os.pathsep.join([str(ROOT), str(FOLDER)]),
        'OMP_NUM_THREADS': '1',
        **variables,
    }
    return subprocess.run(
        [str(part) for part in command],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip


def test_dist_train_of_mmseg_itself(recipes, stock, tmp_path):
    """Two cards, the repository's own script, TensorBoard, then augmentation of the test."""
    import mmseg

    recipe = recipes['segformer']
    backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
    small = replace(recipe, changes=dict(recipe.changes, visualizer=dict(vis_backends=backends)))
    config = write_config(tmp_path / 'config.py', small, 'gcu')
    tools = Path(mmseg.__file__).with_name('.mim') / 'tools'
    options = [f'{name}.num_workers=0' for name in ('train_dataloader', 'val_dataloader')]
    options += [name.replace('num_workers=0', 'persistent_workers=False') for name in options]
    options += ['train_dataloader.batch_size=4', 'train_dataloader.sampler.shuffle=False']
    trained = run(
        'bash', tools / 'dist_train.sh', config, 2, '--work-dir', tmp_path / 'work',
        '--cfg-options', 'randomness.seed=0', *options, PORT='29871',
    )  # fmt: skip
    assert trained.returncode == 0, trained.stdout[-3000:]
    saved = load_file(tmp_path / 'work' / 'iter_10.pth')['state_dict']
    assert distance(saved, stock['segformer']['weights']) <= 1e-3

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (tmp_path / 'work').rglob('events.out.tfevents*')
    written = EventAccumulator(str(events.parent))
    written.Reload()
    losses = [event.value for event in written.Scalars('loss')]
    assert len(losses) == ITERATIONS
    # The log's figures are rank 0's, and means over the last 10 iterations.
    mean = sum(mean_losses([stock], 'segformer')) / ITERATIONS
    assert losses[-1] == pytest.approx(mean, rel=0.02)

    tested = run(
        'mmdevplug', 'test', config, tmp_path / 'work' / 'iter_10.pth', '--tta', '--nproc', 2,
        '--work-dir', tmp_path / 'tested', '--cfg-options', 'test_dataloader.num_workers=0',
        'test_dataloader.persistent_workers=False',
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert 'mIoU' in tested.stdout
