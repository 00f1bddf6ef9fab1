"""Ranks that do not divide a data set between them are told so before they train."""

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from mmengine.dist import all_reduce, get_rank, get_world_size
from mmengine.registry import DATA_SAMPLERS, DATASETS
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, IterableDataset, Sampler, Subset

from mmdevplug.examples.digits import DigitsDataset
from tests.jobs import log_of, needs_later_loops, train_digits
from tests.ranks import RanksFailed, run_ranks


@DATASETS.register_module()
class OtherOrder(DigitsDataset):
    """As files that ``os.listdir`` lists, on two hosts."""

    def load_data_list(self):
        listed = super().load_data_list()
        random.Random(get_rank()).shuffle(listed)
        return listed


@DATASETS.register_module()
class Share(DigitsDataset):
    """Every rank has samples of its own, and goes through all of them."""

    def load_data_list(self):
        return super().load_data_list()[get_rank() :: get_world_size()]


@DATASETS.register_module()
class Folder(Dataset):
    """Paths in a folder of each rank."""

    metainfo = dict(classes=tuple('0123456789'))

    def __init__(self, split='train', missing=None):
        self.inner = DigitsDataset(split)
        paths = [Path(f'/disk{get_rank()}/{index}.png') for index in range(len(self.inner))]
        if get_rank() == 1 and missing is not None:
            paths[missing] = Path('/disk1/other.png')
        self.table = dict(path=paths)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]


@DATASETS.register_module()
class Row(IterableDataset):
    """A stream that knows no ranks, or leaves out what belongs to others."""

    metainfo = dict(classes=tuple('0123456789'))

    def __init__(self, divided=False):
        self.images, self.divided = DigitsDataset(), divided

    def __iter__(self):
        step = (get_rank(), get_world_size()) if self.divided else (0, 1)
        return (self.images[index] for index in range(step[0], len(self.images), step[1]))


@DATASETS.register_module()
class SizedRow(Row):
    """A stream that knows its length."""

    def __len__(self):
        return len(self.images)


@DATA_SAMPLERS.register_module()
class ByWeight(Sampler):
    """Draws from PyTorch's generator, which ranks seed alike, or from one of the rank's own."""

    def __init__(self, dataset, seed=None, own=False, shuffle=True):
        self.size, self.own, self.shuffle = len(dataset), own, shuffle

    def __len__(self):
        return self.size // get_world_size() if self.own else self.size

    def __iter__(self):
        generator = torch.Generator().manual_seed(get_rank()) if self.own else None
        weights = torch.linspace(1, 2, self.size)
        if not self.shuffle:
            return iter(range(self.size))
        return iter(torch.multinomial(weights, len(self), True, generator=generator).tolist())


@DATASETS.register_module()
class Joined(ConcatDataset):
    """Two parts, whose border is elsewhere on each rank."""

    metainfo = dict(classes=tuple('0123456789'))

    def __init__(self):
        inner, border = DigitsDataset('test'), 100 + get_rank()
        parts = [range(border), range(border, len(inner))]
        super().__init__([Subset(inner, part) for part in parts])


class Picked(Sampler):
    def __init__(self, dataset, seed=None, shuffle=True):
        self.picked = self.pick(len(dataset), get_rank(), get_world_size())

    def __len__(self):
        return len(self.picked)

    def __iter__(self):
        return iter(self.picked)


@DATA_SAMPLERS.register_module()
class Blocks(Picked):
    """Gives each rank a block, and the second one a sample of the first."""

    def pick(self, size, rank, ranks):
        return range(rank * size // ranks - rank, (rank + 1) * size // ranks)


@DATA_SAMPLERS.register_module()
class Half(Picked):
    """Divides the first half of a data set between ranks."""

    def pick(self, size, rank, ranks):
        return range(rank, size // 2, ranks)


@DATA_SAMPLERS.register_module()
class OwnBatches(BatchSampler):
    """Takes no indices from its sampler, which divides them."""

    def __init__(self, sampler, batch_size):
        super().__init__(range(len(sampler.dataset)), 359, False)


@DATA_SAMPLERS.register_module()
class Estimated(BatchSampler):
    """Has another length on each rank, which may agree on the smallest when it reads."""

    def __init__(self, sampler, batch_size, agreed):
        super().__init__(sampler, batch_size, True)
        self.agreed = agreed

    def __len__(self):
        return 2 - get_rank()

    def __iter__(self):
        most = torch.tensor(len(self))
        if self.agreed:
            all_reduce(most, 'min')
        return islice(super().__iter__(), int(most))


def train(work_dir, options):
    train_digits('cpu', work_dir, global_batch=2 * 359, train_cfg__max_epochs=1, **options)


def warnings_of(tmp_path, options):
    run_ranks(train, 2, tmp_path, options)
    lines = log_of(tmp_path).splitlines()
    return [line.partition(' - WARNING - ')[2] for line in lines if '_dataloader: ' in line]


def of(name, **options):
    """Options of a data loader."""
    return {f'{name}_dataloader__{key}': value for key, value in options.items()}


IN_ORDER = dict(type='ByWeight', shuffle=False)


@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(of('train', dataset__type='Folder'), **of('val', dataset__type='Folder')),
        of('train', sampler=dict(type='ByWeight', own=True)),
        of('train', dataset__type='Share', sampler=IN_ORDER),
        of('train', batch_sampler=dict(type='Estimated', agreed=True), drop_last=False),
    ],
)
def test_nothing_is_said_of_data_that_are_divided(tmp_path, options):
    assert warnings_of(tmp_path, options) == []


@pytest.mark.parametrize(
    ('name', 'options', 'expected'),
    [
        (
            'train',
            dict(dataset__type='OtherOrder'),
            'OtherOrder.data_address lists the same samples in another order',
        ),
        (
            'train',
            dict(sampler=dict(type='ByWeight')),
            'ByWeight gives ranks 0 and 1 the same samples',
        ),
        ('val', dict(sampler=dict(type='Half')), 'all ranks together read 180 of 360 samples'),
        (
            'train',
            dict(batch_sampler=dict(type='OwnBatches'), drop_last=False),
            'OwnBatches gives ranks 0 and 1 the same samples',
        ),
        (
            'val',
            dict(dataset=dict(type='Folder', missing=1)),
            'Folder.table.path lists other samples on rank 1',
        ),
    ],
)
def test_what_is_said(tmp_path, name, options, expected):
    (line,) = warnings_of(tmp_path, of(name, **options))
    assert line.startswith(f'{name}_dataloader: {expected}')


def test_batch_samplers_that_do_not_agree_are_refused(tmp_path):
    options = of('train', batch_sampler=dict(type='Estimated', agreed=False), drop_last=False)
    with pytest.raises(RanksFailed, match='different numbers of batches') as found:
        run_ranks(train, 2, tmp_path, options)
    assert 'rank 1 has 1 (' in str(found.value)
    assert 'rank 0 has 2 (' in str(found.value)


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        (dict(sampler=IN_ORDER), 'ByWeight gives ranks'),
        (dict(dataset__type='OtherOrder'), 'OtherOrder.data_address lists the same'),
        (dict(dataset=dict(_delete_=True, type='Joined')), 'ranks have data sets'),
        (dict(sampler=dict(type='Blocks')), 'Blocks gives ranks some samples twice'),
    ],
)
def test_a_wrong_metric_is_refused(tmp_path, options, expected):
    with pytest.raises(RanksFailed, match=f'val_dataloader: {expected}') as found:
        run_ranks(train, 2, tmp_path, of('val', **options))
    assert found.value.errors[0][0] == 'SampleError'


@pytest.mark.parametrize(
    ('divided', 'workers', 'readers'),
    [(True, 0, []), (False, 0, ['ranks 0 and 1']), (True, 2, ['two workers'])],
)
def test_a_stream_that_all_ranks_read(tmp_path, divided, workers, readers):
    stream = dict(_delete_=True, type='Row', divided=divided)
    options = dict(
        of('train', sampler=None, num_workers=workers, dataset=stream),
        train_cfg=dict(_delete_=True, by_epoch=False, max_iters=2, val_interval=3),
        param_scheduler=None,
    )
    said = [line.partition(': Row gives')[0] for line in warnings_of(tmp_path, options)]
    expected = 'train_dataloader: {} have read the same first batch'
    assert said == [expected.format(each) for each in readers]


@needs_later_loops
@pytest.mark.parametrize('divided', [True, False])
def test_a_stream_that_all_ranks_validate(tmp_path, divided):
    stream = dict(_delete_=True, type='SizedRow', divided=divided)
    said = warnings_of(tmp_path, of('val', sampler=None, dataset=stream))
    assert len(said) == (not divided)
    assert all(line.startswith('val_dataloader: ranks 0 and 1 have read') for line in said)
