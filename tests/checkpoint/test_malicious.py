"""A checkpoint that would run code when it is loaded is refused, whoever loads it."""

import os

import pytest
import torch

from mmdevplug.checkpoint import reading
from tests.checkpoint.training import build, config, train
from tests.distributed import RanksFailed, run_ranks


class MakesAFolder:
    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def resume(work_dir, path):
    train(work_dir, resume=True, load_from=path)


def resume_the_newest(work_dir, path):
    os.makedirs(work_dir)
    os.link(path, work_dir / 'iter_3.pth')
    train(work_dir, resume=True)


def load(work_dir, path):
    train(work_dir, load_from=path)


def initialize(work_dir, path):
    weights = dict(type='Pretrained', checkpoint=path)
    train(work_dir, model=dict(type='NoisyModel', init_cfg=weights))


def test_it(work_dir, path):
    cfg = dict(load_from=path, test_cfg={}, test_dataloader={}, test_evaluator={})
    found = config(work_dir)
    for name in ('dataloader', 'evaluator'):
        cfg[f'test_{name}'] = found[f'val_{name}']
    build(work_dir, **cfg).test()


def resume_with_flexible_runner(work_dir, path):
    from mmengine.config import Config
    from mmengine.runner import FlexibleRunner

    cfg = config(work_dir)
    for key in ('runner_type', 'accelerator', 'launcher'):
        cfg.pop(key)
    cfg.update(strategy=dict(type='DeviceStrategy', accelerator='cpu'), resume=True)
    FlexibleRunner.from_cfg(Config(dict(cfg, load_from=path))).train()


def load_as_older_pytorch(work_dir, path):
    reading._TAKES_RENAMED_CLASSES = False
    load(work_dir, path)


def initialize_as_older_pytorch(work_dir, path):
    reading._TAKES_RENAMED_CLASSES = False
    initialize(work_dir, path)


test_it.__test__ = False
WAYS = [
    resume,
    resume_the_newest,
    load,
    initialize,
    test_it,
    resume_with_flexible_runner,
    load_as_older_pytorch,
    initialize_as_older_pytorch,
]


def attempt(way, work_dir, path):
    way(work_dir, path)


# PyTorch's own switch for what is unsafe makes no difference.
@pytest.mark.parametrize(
    ('way', 'switch'),
    [*((way, None) for way in WAYS), (load, '1'), (initialize, '1')],
    ids=lambda value: getattr(value, '__name__', str(value)),
)
def test_refused(tmp_path, way, switch):
    folder = tmp_path / 'made by the checkpoint'
    path = tmp_path / 'malicious.pth'
    torch.save(dict(state_dict={}, meta=dict(epoch=1, iter=3), payload=MakesAFolder(folder)), path)
    environ = dict(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=switch)
    with pytest.raises(RanksFailed) as raised:
        run_ranks(attempt, 0, way, tmp_path / 'work', str(path), environ=environ)
    kind, message, _ = raised.value.errors[0]
    assert kind == 'CheckpointError'
    assert 'mkdir' in message
    assert '.pth' in message
    assert not folder.exists()
