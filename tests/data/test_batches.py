"""Data loaders that begin anywhere, and random augmentation that depends on the batch alone."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mmdevplug.data import ResumableBatches, make_resumable
from mmdevplug.data.resumable_loader import derive_seed, seed_workers


class Augmented(Dataset):
    """Each item with a draw of each generator."""

    def __getitem__(self, index):
        draws = [index, random.random(), np.random.rand(), torch.rand(1).item()]
        return torch.tensor(draws, dtype=torch.float64)

    def __len__(self):
        return 12


class ByBatch(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def loader_with(workers, seed=3, dataset=None, **options):
    loader = DataLoader(dataset or Augmented(), batch_size=2, num_workers=workers, **options)
    return loader, make_resumable(loader, seed)


def epochs(loader, count=2):
    return [torch.stack(list(loader)) for _ in range(count)]


def test_workers_draw_the_same_however_many_there_are():
    first = epochs(loader_with(1)[0])
    for options in (dict(workers=3), dict(workers=2, persistent_workers=True)):
        for one, other in zip(first, epochs(loader_with(**options)[0])):
            assert torch.equal(one, other)
    assert torch.equal(first[0], epochs(loader_with(2, dataset=ByBatch())[0])[0])
    # No two batches, epochs, seeds or ranks draw the same.
    draws = torch.cat([first[0], first[1], epochs(loader_with(1, seed=4)[0])[0]])[..., 1:]
    assert draws.flatten().unique().numel() == draws.numel()
    assert derive_seed(3, 0) != derive_seed(3, 1)


@pytest.mark.parametrize('workers', [0, 2])
def test_a_pass_that_begins_in_the_middle(workers):
    whole = epochs(loader_with(workers)[0], 3)
    loader, batches = loader_with(workers)
    order = []
    batches.resume(1, 4, lambda: order.append('pass'), lambda: order.append('batch'))
    rest, following = epochs(loader)
    assert order == ['pass', 'batch']
    assert rest[..., 0].tolist() == whole[1][4:][..., 0].tolist()
    if workers:
        assert torch.equal(rest, whole[1][4:])
        assert torch.equal(following, whole[2])


def test_nothing_of_the_loader_changes():
    plain = DataLoader(Augmented(), batch_size=5, drop_last=True)
    loader = DataLoader(Augmented(), batch_size=5, drop_last=True)
    batches = make_resumable(loader, 3)
    assert isinstance(batches, ResumableBatches)
    assert make_resumable(loader, 3) is batches
    for name in ('batch_size', 'drop_last'):
        assert getattr(loader, name) == getattr(plain, name) == getattr(batches, name)
    assert len(loader) == len(plain) == 2
    assert loader.batch_sampler.sampler is loader.sampler


def test_a_loader_without_batches_is_left_alone():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    for loader in (DataLoader(Stream()), DataLoader(Augmented(), batch_size=None), dict(), None):
        assert make_resumable(loader, 3) is None


def test_the_seed_of_a_rank_can_change():
    _, batches = loader_with(1)
    before = batches.seed
    seed_workers(batches, 99)
    assert batches.seed != before
