"""Let a data loader begin a pass at any batch, and seed its workers for each batch."""

import copy
import hashlib
import random
from functools import partial
from math import inf
from typing import Any, Callable, Iterable, Iterator, List, Mapping, Optional, Sequence

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from mmdevplug.accelerators.random_states import host_random_state
from mmdevplug.errors import SampleError
from mmdevplug.utils.patching import patch_symbol
from mmdevplug.utils.torch_compat import asks_samplers_for_batches

from .stateful import stateful_part

#: A pass that gives more than this many times the length of its sampler has no end.
MOST_PASSES = 2


class SeededBatch(list):
    """Hold the indices of a batch, and the seed for random augmentation in its worker."""

    seed: int = 0  # below 2**63


class ResumableBatches:
    """Wrap the batch sampler of a data loader, so that a pass can begin at any batch.

    After :meth:`resume` the next pass leaves out batches that were trained on before, without
    loading them. Random augmentation in worker processes depends only on the seed, the rank, the
    epoch and the index of the batch, not on the number of workers or on where a run began.

    Args:
        batches (Iterable): A batch sampler; a pass is one epoch.
    """

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self.batches = batches
        self.seed: Optional[int] = None  # of this rank, for workers; None: they are not seeded
        self.epoch = -1
        #: Whether a pass has to end, as that of a loop over epochs.
        self.ends = False
        #: How many batches were drawn from the batch sampler, and how many before this pass.
        self.drawn = self.drawn_before = 0
        #: Whether each pass passes its number to the sampler: who reads may count from 0 again.
        self.sets_epoch = False
        #: The random state of the host when the current pass began. With workers, a loop over
        #: iterations begins the first pass when it is built.
        self.state_at_start: Any = None
        self._skip = self._drop = 0
        self._before_pass: Optional[Callable[[], None]] = None
        self._after_skip: Optional[Callable[[], None]] = None

    def resume(
        self,
        epoch: int,
        skip: int,
        before_pass: Optional[Callable[[], None]] = None,
        after_skip: Optional[Callable[[], None]] = None,
        drop: int = 0,
    ) -> None:
        """Set where the next pass begins.

        Args:
            epoch (int): Index of that pass.
            skip (int): Number of batches to leave out.
            before_pass (callable, optional): Called before the wrapped sampler is started.
            after_skip (callable, optional): Called before the first batch is loaded.
            drop (int): Number of samples to leave out of the first batch. Defaults to 0.
        """
        self.epoch = epoch - 1
        self._skip, self._drop = skip, drop
        self._before_pass, self._after_skip = before_pass, after_skip

    def __iter__(self) -> Iterator[List[int]]:
        # A generator: this runs when the data loader takes the first batch, after it has drawn its
        # own random number.
        self.epoch += 1
        epoch, skip, drop = self.epoch, self._skip, self._drop
        before_pass, after_skip = self._before_pass, self._after_skip
        self._skip, self._drop, self._before_pass, self._after_skip = 0, 0, None, None
        if self.sets_epoch:
            self.batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        if before_pass is not None:
            before_pass()
        self.state_at_start = host_random_state()
        most = MOST_PASSES * max(len(self), 1) if self.ends else inf
        self.drawn_before = self.drawn
        for number, batch in enumerate(self.batches):
            self.drawn += 1
            if number > most:
                sampler = getattr(self.batches, 'sampler', None)
                raise SampleError(
                    f'{type(self.batches).__name__} over {type(sampler).__name__} says that it '
                    f'has {len(self)} batches, but has given {number} in one pass, which seems '
                    f"to have no end. Train by iterations (train_cfg.type='IterBasedTrainLoop', "
                    f"max_iters=...), or set sampler=dict(type='DefaultSampler')."
                )
            if number < skip:
                continue
            if after_skip is not None:
                after_skip()
                after_skip = None
            if drop and number == skip:
                batch = batch[drop:]
                if not batch:  # An incomplete one, which was trained on.
                    continue
            yield self._seeded(batch, epoch, number)
        if after_skip is not None:  # All batches of the epoch were skipped.
            after_skip()

    def _seeded(self, batch: Sequence[int], epoch: int, number: int) -> Any:
        if self.seed is None or not isinstance(batch, (list, tuple)):
            return batch
        seeded = SeededBatch(batch)
        seeded.seed = derive_seed(self.seed, epoch, number)
        return seeded

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # `sampler`, `batch_size`, `drop_last`, and other attributes of the batch sampler.
        if name == 'batches':
            raise AttributeError(name)
        return getattr(self.batches, name)


def derive_seed(*numbers: int) -> int:
    """Hash numbers to a seed, so that neighbouring numbers get unrelated seeds."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little') >> 1


class WorkerInit:
    """Initialize a worker process, so that it seeds its generators for each batch."""

    def __init__(self, worker_init_fn: Optional[Callable[[int], None]]) -> None:
        self._before = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        if self._before is not None:
            self._before(worker_id)
        dataset = torch.utils.data.get_worker_info().dataset
        fetch = partial(_fetch_seeded, dataset, getattr(dataset, '__getitems__', None))
        # Only this process is changed.
        if asks_samplers_for_batches():  # the fetcher looks for it on the object
            dataset.__getitems__ = fetch
        else:
            patch_symbol(
                _MapDatasetFetcher, 'fetch', lambda self, indices: self.collate_fn(fetch(indices))
            )


def _fetch_seeded(
    dataset: Dataset, fetch: Optional[Callable[[Sequence[int]], List[Any]]], indices: Sequence[int]
) -> List[Any]:
    """Load the samples of a batch, after seeding for it."""
    seed = getattr(indices, 'seed', None)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # Not torch.manual_seed, which would start the devices in a worker.
        torch.default_generator.manual_seed(seed)
    return [dataset[index] for index in indices] if fetch is None else fetch(indices)


def make_resumable(loader: DataLoader, seed: Optional[int] = None) -> Optional[ResumableBatches]:
    """Let a data loader begin in the middle of an epoch.

    Args:
        loader (DataLoader): Changed in place, unless it was before.
        seed (int, optional): Of the runner, for random augmentation in workers. Defaults to None:
            workers are not seeded.

    Returns:
        ResumableBatches or None: The new batch sampler; None if the loader has no batch sampler,
        as for an ``IterableDataset``, or saves its place itself.
    """
    batches = resumable_batches(loader)
    if batches is not None:
        return batches
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return None
    if isinstance(loader.dataset, IterableDataset) or stateful_part(loader) is not None:
        return None
    batches = ResumableBatches(loader.batch_sampler)
    object.__setattr__(loader, 'batch_sampler', batches)  # DataLoader's setter refuses
    if loader.num_workers > 0 and seed is not None:
        seed_workers(batches, seed)
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)
    return batches


def resumable_batches(loader: Optional[DataLoader]) -> Optional[ResumableBatches]:
    """Return the :class:`ResumableBatches` of a data loader, None if it has none."""
    batches = getattr(loader, 'batch_sampler', None)
    return batches if isinstance(batches, ResumableBatches) else None


def seed_workers(batches: ResumableBatches, seed: int) -> None:
    """Seed the batches of this rank by the runner's seed, which may be the same on all ranks."""
    batches.seed = derive_seed(seed, get_rank())


def sampler_of(loader: DataLoader) -> Any:
    """Return the sampler that shuffles: that of the batch sampler, or of the data loader."""
    batches = getattr(loader, 'batch_sampler', None)
    return getattr(batches, 'sampler', None) or getattr(loader, 'sampler', None)


def build_sampler(loader: DataLoader, config: object, seed: Optional[int]) -> Any:
    """Build the sampler of a loader again from its config; None if the config has none."""
    sampler = config.get('sampler') if isinstance(config, Mapping) else None
    if not isinstance(sampler, Mapping):
        return None
    defaults = dict(dataset=loader.dataset, seed=seed)
    return DATA_SAMPLERS.build(copy.deepcopy(dict(sampler)), default_args=defaults)


def build_batch_sampler(loader: DataLoader, config: Any, sampler: Sampler) -> Any:
    """Build the batch sampler of a loader again from its config, over a sampler."""
    batches = config.get('batch_sampler')
    if not isinstance(batches, Mapping):
        return BatchSampler(sampler, loader.batch_size, loader.drop_last)
    defaults = dict(sampler=sampler, batch_size=config.get('batch_size'))
    return DATA_SAMPLERS.build(copy.deepcopy(dict(batches)), default_args=defaults)


def renew_sampler(loader: DataLoader, config: Any, seed: Optional[int]) -> None:
    """Replace the sampler of a loader by a new one: it may have been read from already."""
    batches = resumable_batches(loader)
    sampler = None if batches is None else build_sampler(loader, config, seed)
    if batches is None or sampler is None:
        return
    batches.batches = build_batch_sampler(loader, config, sampler)
    if not isinstance(config.get('batch_sampler'), Mapping):
        vars(loader)['sampler'] = sampler
