"""The remote sensing example: a vision transformer of mmseg's on drawn aerial tiles."""

import numpy as np
import pytest
from mmengine.config import Config

from tests.columns import job_of
from tests.jobs import ROOT, largest_difference, trained_weights
from tests.ranks import run_ranks
from tests.repos.training import Recorder, build_runner

FOLDER = ROOT / 'configs' / 'remote_sensing'

#: As small as can be on eight cards: most of the time goes into compiling.
SMALL = {
    'model.data_preprocessor.size': (32, 32),
    'model.backbone.img_size': (32, 32),
    'model.backbone.embed_dims': 16,
    'model.backbone.num_layers': 2,
    'model.backbone.out_indices': (0, 1),
    'model.neck.in_channels': [16, 16],
    'model.neck.out_channels': 16,
    'model.neck.scales': [2, 1],
    'model.decode_head.in_channels': [16, 16],
    'model.decode_head.in_index': [0, 1],
    'model.decode_head.pool_scales': (1, 2),
    'model.decode_head.channels': 8,
    'model.auxiliary_head.in_channels': 16,
    'model.auxiliary_head.in_index': 1,
    'model.auxiliary_head.channels': 8,
    'train_dataloader.dataset.size': 32,
    'train_dataloader.dataset.tiles': 32,
    'train_cfg.max_iters': 20,
    'train_cfg.val_interval': 100,
    'optim_wrapper.optimizer.lr': 0.01,
}


pytestmark = pytest.mark.operators


def train_example(name, work_dir, options):
    """Train a config of the example.

    Returns:
        dict: ``losses``, ``miou``, ``device``, ``weights``, and ``batch``, that of this rank.
    """
    cfg = Config.fromfile(str(FOLDER / name))
    cfg.merge_from_dict(options)
    cfg.work_dir, cfg.launcher = str(work_dir), 'pytorch'
    runner = build_runner(cfg)
    recorder = Recorder()
    runner.register_hook(recorder)
    runner.train()
    return dict(
        losses=[step['loss'] for step in recorder.losses],
        miou=float(recorder.metrics[-1]['mIoU']) if recorder.metrics else None,
        device=str(next(runner.model.parameters()).device),
        weights=trained_weights(runner),
        batch=runner.train_dataloader.batch_size,
    )


def pictures(dataset):
    return [dataset[number]['inputs'].numpy() for number in range(4)]


def test_tiles_depend_on_their_number_alone():
    from mmseg.registry import DATASETS

    cfg = Config.fromfile(str(FOLDER / 'remote_sensing.py'))
    train, again, val = (
        DATASETS.build(dict(loader.dataset, pipeline=cfg.test_pipeline, _scope_='mmseg'))
        for loader in (cfg.train_dataloader, cfg.train_dataloader, cfg.val_dataloader)
    )
    assert len(train) == 512
    assert len(val) == 64
    for one, other in zip(pictures(train), pictures(again)):
        assert (one == other).all()
    drawn = [*pictures(train), *pictures(val)]
    assert len({picture.tobytes() for picture in drawn}) == len(drawn)


def test_tiles_have_all_of_lovedas_classes():
    from mmdevplug.examples.remote_sensing import GROUND, AerialTiles, draw_ground

    assert tuple(GROUND) == AerialTiles.METAINFO['classes']
    drawn = [draw_ground(np.random.RandomState(number), 64) for number in range(32)]
    shares = np.bincount(np.stack(drawn).ravel()) / np.stack(drawn).size
    assert len(shares) == len(GROUND)
    assert shares.min() >= 0.02


def test_an_unknown_split_is_refused():
    from mmdevplug.examples.remote_sensing import AerialTiles

    with pytest.raises(ValueError, match="split='test': expected 'train' or 'val'"):
        AerialTiles(split='test')


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_learns_on_two_ranks(tmp_path):
    ranks = run_ranks(train_example, 2, 'remote_sensing_cpu.py', tmp_path, {}, timeout=580)
    assert len(ranks[0]['losses']) == 100
    assert np.mean(ranks[0]['losses'][-10:]) < 0.6 * np.mean(ranks[0]['losses'][:10])
    assert ranks[0]['miou'] >= 70.0


@pytest.mark.xla
@pytest.mark.long
@pytest.mark.timeout(600)
def test_eight_ranks_each_on_its_card(tmp_path):
    job = dict(job_of('gcu', 8), timeout=580)
    ranks = run_ranks(train_example, 8, 'remote_sensing_gcu_t20_8x.py', tmp_path, SMALL, **job)
    mean = np.mean([found['losses'] for found in ranks], axis=0)
    assert len(mean) == 20
    assert mean[-2:].mean() < 0.9 * mean[:2].mean()
    for rank, found in enumerate(ranks):
        assert found['device'] == f'xla:{rank}'
        assert found['batch'] == 2
        # With synchronized statistics, and from the averaged gradients.
        assert largest_difference(found['weights'], ranks[0]['weights']) <= 1e-6
