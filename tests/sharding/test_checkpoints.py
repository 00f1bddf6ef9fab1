"""Checkpoints of sharded trainings: a file or a folder, resumed to the same bits."""

import os

import pytest
import torch

from tests.jobs import load_file
from tests.ranks import run_ranks

from .jobs import train
from .test_training import ADAM, NO_DECAY, pytestmark  # noqa: F401

HALF = 5
OPTIONS = dict(
    optim_wrapper__optimizer=ADAM,
    optim_wrapper__paramwise_cfg=dict(NO_DECAY, bypass_duplicate=True),
    optim_wrapper__clip_grad=dict(max_norm=1.0),
    default_hooks__checkpoint__interval=HALF,
    param_scheduler=[dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=8)],
    custom_hooks=[],
)


def run(work_dir, sharding, **options):
    return train('twice', 'cpu', work_dir, sharding=sharding, **OPTIONS, **options)


def load_alone(path):
    """What MMEngine's own functions make of a file in one process."""
    from mmengine.registry import MODELS
    from mmengine.runner.checkpoint import _load_checkpoint_to_model

    model = MODELS.build(dict(type='ShardedTwice'))
    _load_checkpoint_to_model(model, load_file(path), strict=True)
    return model.state_dict()


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], expected[k]) for k in found
    )


@pytest.mark.parametrize('folder', [False, True])
def test_a_resumed_run_is_the_run_that_was_interrupted(folder, tmp_path):
    sharding = dict(sharded_checkpoint=folder)
    first = tmp_path / 'first'
    whole = run_ranks(run, 2, str(first), sharding)
    path = str(first / f'iter_{HALF}.pth')
    assert os.path.isdir(str(first / f'iter_{HALF}.shards')) is folder
    again = dict(resume=True, load_from=path)
    resumed = run_resumed(2, tmp_path, sharding, again)
    for one, other in zip(whole, resumed):
        assert other['losses'][HALF:] == one['losses'][HALF:]  # those before are rank 0's alone
        assert equal(other['weights'], one['weights'])
        assert len(one['states']) == len(other['states']) > 0
        assert all(map(torch.equal, one['states'], other['states']))
    for ranks in (0, 4):
        for other in run_resumed(ranks, tmp_path, sharding, again):
            for name, weight in whole[0]['weights'].items():
                torch.testing.assert_close(other['weights'][name], weight, rtol=0, atol=1e-5)
    last = str(first / 'iter_10.pth')
    if folder:
        assert 'shards' in load_file(last)
    else:
        assert equal(load_alone(last), whole[0]['weights'])
        saved = load_file(last)['optimizer']['state']
        shapes = {each['exp_avg'].shape for each in saved.values()}
        assert whole[0]['weights']['stem.weight'].shape in shapes


def run_resumed(ranks, tmp_path, sharding, again):
    return run_ranks(run_again, ranks, str(tmp_path / f'on_{ranks}'), sharding, again)


def run_again(work_dir, sharding, again):
    return run(work_dir, sharding, **again)
