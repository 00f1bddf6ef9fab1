"""Batches of one process for several chips; what they train is in ``tests/xla/test_spmd.py``."""

from types import SimpleNamespace

import pytest

from mmdevplug.errors import ModelError
from mmdevplug.spmd.batches import LOADERS, enlarge_batches


def test_batches_are_those_of_as_many_ranks():
    loaders = [dict(batch_size=size, num_workers=1) for size in (4, 1, 2)]
    runner = SimpleNamespace(**dict(zip(LOADERS, loaders)))
    enlarge_batches(runner, 8)
    sizes = [getattr(runner, name)['batch_size'] for name in LOADERS]
    assert sizes == [32, 1, 16]  # images of several sizes are in batches of one
    assert loaders[0]['batch_size'] == 4


@pytest.mark.parametrize('loader', [dict(num_workers=1), object()])
def test_a_loader_whose_batch_is_not_known_is_refused(loader):
    with pytest.raises(ModelError, match='train_dataloader has no batch_size.*8 chips'):
        enlarge_batches(SimpleNamespace(_train_dataloader=loader), 8)
