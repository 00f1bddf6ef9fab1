"""A batch sampler that can begin anywhere, and batches that carry their own seed."""

import hashlib
import random
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence

import numpy as np
import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from mmdevplug.accelerators.random_states import host_random_state
from mmdevplug.utils.patching import patch_symbol
from mmdevplug.utils.torch_compat import asks_samplers_for_batches


class SeededBatch(list):
    """The indices of a batch, and the seed for what workers do at random to its samples.

    Attributes:
        seed (int): Below 2**63.
    """

    seed: int = 0


class ResumableBatches:
    """Wraps the batch sampler of a data loader.

    Without anything said it yields what it wraps. After :meth:`resume` its next pass leaves out
    batches that were trained on before, without loading them.

    Random augmentation in worker processes depends on the seed, the rank, the epoch and the
    number of the batch alone, not on how many workers there are, nor on where a run began.

    Args:
        batches (Iterable): A batch sampler; a pass is one epoch.
        seed (int, optional): Of this rank, for workers. Defaults to None: they are left alone.
    """

    def __init__(self, batches: Iterable[Sequence[int]], seed: Optional[int] = None) -> None:
        self.batches = batches
        self.seed = seed
        self.epoch = -1
        #: What the generators of the host were when the current pass began. With workers, a loop
        #: over iterations begins the first pass when it is built.
        self.state_at_start: Any = None
        self._skip = 0
        self._before_pass: Optional[Callable[[], None]] = None
        self._after_skip: Optional[Callable[[], None]] = None

    def resume(
        self,
        epoch: int,
        skip: int,
        before_pass: Optional[Callable[[], None]] = None,
        after_skip: Optional[Callable[[], None]] = None,
    ) -> None:
        """Say where the next pass begins.

        Args:
            epoch (int): The number of that pass.
            skip (int): How many batches to leave out.
            before_pass (callable, optional): Called before the wrapped sampler is started.
            after_skip (callable, optional): Called when the first batch is about to be loaded.
        """
        self.epoch = epoch - 1
        self._skip = skip
        self._before_pass, self._after_skip = before_pass, after_skip

    def __iter__(self) -> Iterator[List[int]]:
        # A generator: nothing of this runs before the data loader asks for the first batch, which
        # it does when it has drawn its own random number.
        self.epoch += 1
        epoch, skip = self.epoch, self._skip
        before_pass, after_skip = self._before_pass, self._after_skip
        self._skip, self._before_pass, self._after_skip = 0, None, None
        if before_pass is not None:
            before_pass()
        self.state_at_start = host_random_state()
        for number, batch in enumerate(self.batches):
            if number < skip:
                continue
            if after_skip is not None:
                after_skip()
                after_skip = None
            yield self._seeded(batch, epoch, number)
        if after_skip is not None:  # the epoch had ended, all but for what follows it
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
        # `sampler`, `batch_size`, `drop_last`, and whatever a batch sampler has of its own.
        if name == 'batches':
            raise AttributeError(name)
        return getattr(self.batches, name)


def derive_seed(*numbers: int) -> int:
    """A seed for each combination of numbers, unlike those of its neighbours."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little') >> 1


def seed_host(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators on the host."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which would wake the devices in a worker.
    torch.default_generator.manual_seed(seed)


class SeededFetch:
    """Loads the samples of a batch in a worker process, after seeding for it.

    Args:
        dataset: The worker's copy of the dataset, of which it becomes ``__getitems__``.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._fetch = getattr(dataset, '__getitems__', None)

    def __call__(self, indices: Sequence[int]) -> List[Any]:
        seed = getattr(indices, 'seed', None)
        if seed is not None:
            seed_host(seed)
        if self._fetch is not None:
            return self._fetch(indices)
        return [self._dataset[index] for index in indices]


class WorkerInit:
    """What a worker process does first.

    Args:
        before (callable, optional): The data loader's own function. Defaults to None.
    """

    def __init__(self, before: Optional[Callable[[int], None]] = None) -> None:
        self._before = before

    def __call__(self, worker_id: int) -> None:
        if self._before is not None:
            self._before(worker_id)
        dataset = torch.utils.data.get_worker_info().dataset
        fetch = SeededFetch(dataset)
        # Both in this process alone.
        if asks_samplers_for_batches():  # the fetcher looks for it on the object
            dataset.__getitems__ = fetch
        else:
            patch_symbol(
                _MapDatasetFetcher,
                'fetch',
                lambda self, indices: self.collate_fn(fetch(indices)),
            )
