"""Make a data loader resumable in place."""

import copy
from typing import Any, Mapping, Optional

from mmengine.dist import get_rank
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .batches import ResumableBatches, WorkerInit, derive_seed


def make_resumable(loader: Any, seed: Optional[int] = None) -> Optional[ResumableBatches]:
    """Let a data loader begin in the middle of an epoch.

    Args:
        loader (DataLoader): Changed in place, unless it was before.
        seed (int, optional): Of the runner, for what workers do at random. Defaults to None: they
            are left alone.

    Returns:
        ResumableBatches or None: What yields the batches; None if the loader has no batch
        sampler, as for an ``IterableDataset``.
    """
    batches = resumable_batches(loader)
    if batches is not None:
        return batches
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    if isinstance(loader.dataset, IterableDataset):
        return None
    batches = ResumableBatches(loader.batch_sampler)
    # DataLoader allows no other way to change it.
    vars(loader)['batch_sampler'] = batches
    if loader.num_workers > 0 and seed is not None:
        seed_workers(batches, seed)
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)
    return batches


def resumable_batches(loader: Any) -> Optional[ResumableBatches]:
    """The :class:`ResumableBatches` of a data loader, None if it has none."""
    batches = getattr(loader, 'batch_sampler', None)
    return batches if isinstance(batches, ResumableBatches) else None


def seed_workers(batches: ResumableBatches, seed: int) -> None:
    """Seed the batches of this rank.

    Args:
        batches (ResumableBatches): Changed in place.
        seed (int): Of the runner, whether or not it is the same on all ranks.
    """
    batches.seed = derive_seed(seed, get_rank())


def sampler_of(loader: Any) -> Any:
    """The sampler that shuffles: the data loader's own, or that of its batch sampler."""
    batches = getattr(loader, 'batch_sampler', None)
    return getattr(batches, 'sampler', None) or getattr(loader, 'sampler', None)


def renew_sampler(loader: Any, config: Any, seed: Optional[int]) -> None:
    """Build the sampler anew, because it may have been read from already.

    Args:
        loader (DataLoader): With :class:`ResumableBatches`.
        config: The config of the loader; without one the sampler stays as it is.
        seed (int, optional): What the sampler shuffles by.
    """
    batches = resumable_batches(loader)
    if batches is None or not isinstance(config, Mapping):
        return
    config = copy.deepcopy(dict(config))
    if not isinstance(config.get('sampler'), Mapping):
        return
    sampler = DATA_SAMPLERS.build(
        dict(config['sampler']), default_args=dict(dataset=loader.dataset, seed=seed)
    )
    if isinstance(config.get('batch_sampler'), Mapping):
        batches.batches = DATA_SAMPLERS.build(
            dict(config['batch_sampler']),
            default_args=dict(sampler=sampler, batch_size=config.get('batch_size')),
        )
        return
    batches.batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    vars(loader)['sampler'] = sampler
