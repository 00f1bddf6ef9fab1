"""Samplers without an end are refused where a loop goes through its data to the end."""

import itertools

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop as Testing, ValLoop
from torch.utils.data import BatchSampler, Sampler

from mmdevplug.data.endless import check_endless
from mmdevplug.errors import SampleError
from mmdevplug.runner import DeviceRunner
from tests.jobs import digits_config

SIZE = 8


@DATA_SAMPLERS.register_module()
class Ending(Sampler):
    """A sampler of a user, whose passes end."""

    def __init__(self, dataset, seed=None):
        self.size = len(dataset)

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())

    def __len__(self):
        return self.size


@DATA_SAMPLERS.register_module()
class Once(Ending):
    """Reads from one iterator, so that a pass cannot be tried on it."""

    def __init__(self, dataset, seed=None):
        super().__init__(dataset)
        self.samples = itertools.chain.from_iterable(range(self.size) for _ in range(2))

    def __iter__(self):
        return itertools.islice(self.samples, self.size)


@DATA_SAMPLERS.register_module()
class Cycling(Ending):
    def __iter__(self):
        return itertools.cycle(range(self.size))


@DATA_SAMPLERS.register_module()
class Repeating(BatchSampler):
    def __init__(self, sampler, batch_size):
        super().__init__(sampler, batch_size, False)

    def __iter__(self):
        while True:
            yield from super().__iter__()


@DATA_SAMPLERS.register_module()
class OfItsOwn(BatchSampler):
    """Takes samplers of one type, and gives batches of one sample at first."""

    def __init__(self, sampler, batch_size):
        assert isinstance(sampler, Ending)
        super().__init__(sampler, batch_size, False)

    def __iter__(self):
        samples = list(self.sampler)
        yield from [samples[:1], samples[1:2], samples[2:4], samples[4:6], samples[6:]]


def loader_of(**config):
    config = dict(dict(dataset=list(range(SIZE)), batch_size=2, num_workers=0), **config)
    return DeviceRunner.build_dataloader(dict(config, collate_fn=dict(type='default_collate')), 1)


def loop_of(kind, loader):
    loop = kind.__new__(kind)
    loop.dataloader, loop._max_epochs = loader, 3
    return loop


def sampler(name, **more):
    return dict(sampler=dict(type=name, **more))


REPEATED = dict(**sampler('DefaultSampler'), batch_sampler=dict(type='Repeating'), batch_size=2)


@pytest.mark.parametrize(
    'config', [sampler('InfiniteSampler'), sampler('Cycling'), REPEATED], ids=str
)
def test_an_epoch_without_end_is_refused(config):
    loader = loader_of(**config)
    with pytest.raises(SampleError) as caught:
        check_endless(loop_of(EpochBasedTrainLoop, loader), 'train_dataloader', config, 1)
    name = config.get('batch_sampler', config['sampler'])['type']
    for part in (name, "'IterBasedTrainLoop', max_iters=12", "'DefaultSampler', shuffle=True"):
        assert part in str(caught.value)
    for kind in (ValLoop, Testing):
        with pytest.raises(SampleError, match=f'{kind.__name__} would never end'):
            check_endless(loop_of(kind, loader), 'val_dataloader', config, 1)
    check_endless(loop_of(IterBasedTrainLoop, loader), 'train_dataloader', config, 1)


@pytest.mark.parametrize('name', ['DefaultSampler', 'Ending', 'Once', 'OfItsOwn'])
def test_what_ends_gives_the_same_samples_as_if_it_had_not_been_tried(name):
    config = dict(sampler('Ending' if name == 'OfItsOwn' else name), batch_size=2)
    if name == 'OfItsOwn':
        config['batch_sampler'] = dict(type=name)

    def read(checked):
        torch.manual_seed(3)
        loader = loader_of(**config)
        if checked:
            loop = loop_of(EpochBasedTrainLoop, loader)
            check_endless(loop, 'train_dataloader', config, 1)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    found = read(checked=True)
    assert found == read(checked=False)
    assert sorted(found[1]) == list(range(SIZE))


@pytest.mark.parametrize('name', ['train', 'val'])
def test_a_job_says_so_at_its_start(name, tmp_path):
    cfg = digits_config('cpu', tmp_path)
    cfg[f'{name}_dataloader'].sampler = dict(type='InfiniteSampler')
    runner = DeviceRunner.from_cfg(cfg)
    with pytest.raises(SampleError, match=f'{name}_dataloader: the sampler InfiniteSampler'):
        runner.train()
    assert runner.iter == 0


class ReadsABatch(Hook):
    """Begins another loop over the training data and stops early, as a PreciseBNHook does."""

    def after_train_iter(self, runner, *args, **kwargs):
        next(iter(runner.train_dataloader))


@pytest.mark.parametrize('name', ['DefaultSampler', 'InfiniteSampler'])
def test_a_hook_that_ends_an_infinite_sampler_is_named(name, tmp_path):
    cfg = digits_config('cpu', tmp_path, default_hooks__checkpoint=None)
    cfg.train_cfg = dict(by_epoch=False, max_iters=3, val_interval=4)
    cfg.train_dataloader.sampler = dict(type=name)
    cfg.param_scheduler = None
    runner = DeviceRunner.from_cfg(cfg)
    runner.register_hook(ReadsABatch())
    if name == 'DefaultSampler':
        runner.train()
        assert runner.iter == 3
        return
    with pytest.raises(SampleError, match='InfiniteSampler of .* no batch.*DefaultSampler'):
        runner.train()
