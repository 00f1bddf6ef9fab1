"""Refuse infinite samplers in epoch-based and validation loops; allow them in other loops."""

from itertools import islice
from typing import Any, Optional

from mmengine.dataset import DefaultSampler
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, TestLoop, ValLoop
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from mmdevplug.accelerators.random_states import host_random_state, set_host_random_state
from mmdevplug.errors import SampleError
from mmdevplug.utils.loops import length_of

from .order import build_batch_sampler, build_sampler
from .resumable_loader import ResumableLoader

#: A pass that gives more than this many times the length of its sampler has no end.
MOST_PASSES = 2
#: Their passes end, so nothing has to be tried.
_ENDING = (DefaultSampler, DistributedSampler, RandomSampler, SequentialSampler)
#: The number of samples that a batch sampler is tried with, which may read the data of each.
TRIED = 64


def check_endless(loop: BaseLoop, key: str, config: object, seed: Optional[int]) -> None:
    """Refuse a loop over epochs, of validation or of testing, whose sampler never ends.

    Samplers are built a second time from their config and read to their end, because reading may
    change them. Those that are not built from a config are not tried.

    Args:
        loop: A loop that is built.
        key (str): The key of its data loader in the config.
        config: The config of its data loader.
        seed (int, optional): The seed of samplers.

    Raises:
        SampleError: If a pass has no end.
    """
    by_epoch = getattr(type(loop), 'run_epoch', None) is EpochBasedTrainLoop.run_epoch
    if not by_epoch and getattr(type(loop), 'run', None) not in (ValLoop.run, TestLoop.run):
        return
    loader = loop.dataloader
    if length_of(loader.dataset) is None and not by_epoch:
        raise SampleError(
            f'{key}: {type(loader.dataset).__name__} has no length, and {type(loop).__name__} '
            f'passes it to the metrics. Give the dataset a method __len__.'
        )
    state = host_random_state()
    found = _find_endless(loader, config, seed)
    set_host_random_state(state)
    if found is None:
        return
    length = len(found)
    message = (
        f'{key}: the sampler {type(found).__name__} says that its length is {length}, but a pass '
        f'has no end'
    )
    if not by_epoch:
        raise SampleError(
            f'{message}, so {type(loop).__name__} would never end. Set '
            f"{key}.sampler=dict(type='DefaultSampler', shuffle=False)."
        )
    iterations = loop.max_epochs * len(loader)
    raise SampleError(
        f'{message}, so {type(loop).__name__} would never end its first epoch. Train by '
        f"iterations: train_cfg=dict(type='IterBasedTrainLoop', max_iters={iterations}), or set "
        f"{key}.sampler=dict(type='DefaultSampler', shuffle=True)."
    )


def take_for_endless(loader: object) -> None:
    """Give the loader of a stream a length: schedulers and hooks ask for it."""
    if isinstance(loader, ResumableLoader) and length_of(loader) is None:
        loader.unknown_length = True


def _find_endless(loader: DataLoader, config: object, seed: Optional[int]) -> Any:
    """The sampler or batch sampler without an end; None if both end, or cannot be built again."""
    sampler = build_sampler(loader, config, seed)
    if sampler is None:
        return None
    if type(sampler) not in _ENDING and _is_endless(sampler):
        return sampler
    batches = build_batch_sampler(loader, config, _shorten(sampler))
    return batches if type(batches) is not BatchSampler and _is_endless(batches) else None


def _is_endless(sampler: Any) -> bool:
    most = MOST_PASSES * max(len(sampler), 1)
    return next(islice(iter(sampler), most, None), None) is not None


def _shorten(sampler: Any) -> Any:
    """Let a sampler give its first samples alone; batch samplers may look at its type."""
    kind = type(sampler)
    methods = dict(
        __iter__=lambda self: islice(kind.__iter__(self), TRIED),
        __len__=lambda self: min(TRIED, kind.__len__(self)),
    )
    sampler.__class__ = type(kind.__name__, (kind,), methods)
    return sampler
