"""Seed the random numbers of worker processes anew for each batch."""

import hashlib
import random
from functools import partial
from typing import Any, Callable, List, Optional, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from mmdevplug.utils.patching import patch_symbol
from mmdevplug.utils.torch_compat import ASKS_FOR_BATCHES


class SeededBatch(list):
    """Hold the indices of a batch, and the seed for random augmentation in its worker."""

    seed: int = 0  # below 2**63


def derive_seed(*numbers: int) -> int:
    """Hash numbers to a seed, so that neighbouring numbers get unrelated seeds."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little') >> 1


def seeded_batch(seed: int, batch: Sequence[object], number: int, index: int) -> SeededBatch:
    """Return a batch of indices with its seed, of a pass by its number."""
    seeded = SeededBatch(batch)
    seeded.seed = derive_seed(seed, number, index)
    return seeded


class WorkerInit:
    """Initialize a worker process, so that it seeds its generators for each batch."""

    def __init__(self, worker_init_fn: Optional[Callable[[int], None]]) -> None:
        self._before = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        if self._before is not None:
            self._before(worker_id)
        worker: Any = torch.utils.data.get_worker_info()
        dataset = worker.dataset
        fetch = partial(_fetch_seeded, dataset, getattr(dataset, '__getitems__', None))
        # Only this process is changed.
        if ASKS_FOR_BATCHES:  # the fetcher looks for it on the object
            dataset.__getitems__ = fetch
        else:
            patch_symbol(
                _MapDatasetFetcher,
                'fetch',
                # Without ``auto_collation`` the dataset gives a batch for an index.
                lambda self, indices: self.collate_fn(
                    fetch(indices) if self.auto_collation else dataset[indices]
                ),
            )


def _fetch_seeded(
    dataset: Dataset,
    fetch: Optional[Callable[[Sequence[int]], List[object]]],
    indices: Sequence[int],
) -> List[object]:
    """Load the samples of a batch, after seeding for it."""
    seed = getattr(indices, 'seed', None)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # Not torch.manual_seed, which would start the devices in a worker.
        torch.default_generator.manual_seed(seed)
    return [dataset[index] for index in indices] if fetch is None else fetch(indices)
