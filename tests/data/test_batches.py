"""Data loaders that go on anywhere, and random augmentation that depends on the batch alone."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler, InfiniteSampler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mmdevplug.accelerators.random_states import host_random_state, set_host_random_state
from mmdevplug.data import ResumableLoader, make_resumable
from mmdevplug.data.seeded_workers import derive_seed


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
    return make_resumable(loader, seed)


def epochs(loader, count=2):
    return [torch.stack(list(loader)) for _ in range(count)]


def test_workers_draw_the_same_however_many_there_are():
    first = epochs(loader_with(1))
    for options in (dict(workers=3), dict(workers=2, persistent_workers=True)):
        for one, other in zip(first, epochs(loader_with(**options))):
            assert torch.equal(one, other)
    assert torch.equal(first[0], epochs(loader_with(2, dataset=ByBatch()))[0])
    # No two batches, epochs, seeds or ranks draw the same.
    draws = torch.cat([first[0], first[1], epochs(loader_with(1, seed=4))[0]])[..., 1:]
    assert draws.flatten().unique().numel() == draws.numel()
    assert derive_seed(3, 0) != derive_seed(3, 1)


@pytest.mark.parametrize('workers', [0, 2])
def test_a_loader_whose_dataset_gives_batches_goes_on(workers):
    """With ``batch_size=None`` there is no batch sampler, and each index is a batch."""

    def fresh():
        dataset = Augmented()
        sampler = DefaultSampler(dataset, seed=5)
        loader = DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers)
        return make_resumable(loader, 3, dict(sampler=dict(type='DefaultSampler', shuffle=True)))

    whole = [int(each[0]) for each in fresh()]
    loader, resumed = fresh(), fresh()
    reading = iter(loader)
    read = [int(each[0]) for _, each in zip(range(5), reading)]
    resumed.load_state_dict(loader.state_dict())
    assert read + [int(each[0]) for each in resumed] == whole
    assert not resumed.inexact


@pytest.mark.parametrize(
    'options',
    [
        dict(workers=0, shuffle=True),
        dict(workers=2, shuffle=True),
        dict(workers=2, shuffle=True, persistent_workers=True),
        dict(workers=2, sampler='InfiniteSampler'),
    ],
    ids=['plain', 'workers', 'persistent', 'infinite'],
)
@pytest.mark.parametrize('read', [0, 3, 6, 'all'])
def test_what_was_yielded_is_not_yielded_again(options, read):
    """In the middle of a pass, at its end and after it, with the same random numbers."""

    def passes(loader, reading=None):
        batches = list(zip(range(9), loader if reading is None else reading))
        return torch.stack([batch for _, batch in batches + list(zip(range(9), loader))])

    def fresh():
        if 'sampler' not in options:
            return loader_with(**options)
        loader = loader_with(workers=2, sampler=InfiniteSampler(range(12), seed=5))
        return make_resumable(loader, 3, dict(sampler=dict(type='InfiniteSampler')))

    if 'sampler' in options and read == 'all':
        read = 9  # a pass of it has no end
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = fresh()
    if 'sampler' not in options:  # MMEngine's gives no more after that
        list(zip(range(5), loader))  # a pass that is given up
    reading = iter(loader)
    for _ in range(9 if read == 'all' else read):
        next(reading, None)
    reading = None if read == 'all' else reading
    state = loader.state_dict()
    restore = partial(set_host_random_state, host_random_state())
    expected = passes(loader, reading)
    again = fresh()
    begun = iter(again)  # as a loop over iterations does before it is resumed
    again.load_state_dict(state)
    if read == 'all':
        restore()
        assert torch.equal(passes(again), expected)
    else:
        again.before_next = restore
        assert torch.equal(passes(again, begun), expected)


def test_nothing_of_the_loader_changes():
    plain = DataLoader(Augmented(), batch_size=5, drop_last=True)
    loader = DataLoader(Augmented(), batch_size=5, drop_last=True)
    batches = loader.batch_sampler
    assert isinstance(make_resumable(loader, 3), ResumableLoader)
    assert make_resumable(loader, 3) is loader
    assert loader.batch_sampler is batches
    assert len(loader) == len(plain) == len(iter(loader)) == 2
    assert loader.batch_sampler.sampler is loader.sampler


def test_a_place_that_is_not_known():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    loader = make_resumable(DataLoader(Stream()), 3)
    assert loader.state_dict() == {}  # nothing was read
    assert len(list(loader)) == 3
    assert loader.state_dict() is None
    assert make_resumable(dict()) is make_resumable(None) is None
