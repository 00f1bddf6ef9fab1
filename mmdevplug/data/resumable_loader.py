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
        seed (int, optional): Of the runner, for random augmentation in workers. Defaults to None:
            workers are not seeded.

    Returns:
        ResumableBatches or None: The new batch sampler; None if the loader has no batch sampler,
        as for an ``IterableDataset``.
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
    """Return the :class:`ResumableBatches` of a data loader, None if it has none."""
    batches = getattr(loader, 'batch_sampler', None)
    return batches if isinstance(batches, ResumableBatches) else None


def seed_workers(batches: ResumableBatches, seed: int) -> None:
    """Seed the batches of this rank by the runner's seed, which may be the same on all ranks."""
    batches.seed = derive_seed(seed, get_rank())


def sampler_of(loader: Any) -> Any:
    """Return the sampler that shuffles: that of the batch sampler, or of the data loader."""
    batches = getattr(loader, 'batch_sampler', None)
    return getattr(batches, 'sampler', None) or getattr(loader, 'sampler', None)


def renew_sampler(loader: Any, config: Any, seed: Optional[int]) -> None:
    """Build the sampler of a loader again from its config: it may have been read from already."""
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
