"""The order in which a loader reads: what samplers give, pass after pass, and what they keep."""

import copy
import pickle
from collections import deque
from inspect import isgenerator
from itertools import chain, islice
from random import Random
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import BatchSampler, Sampler

from mmdevplug.accelerators.random_states import host_random_state, set_host_random_state
from mmdevplug.utils.annotations import StateDict

#: How states of generators are read and set that a sampler may hold.
_GENERATORS: Dict[type, Tuple[Callable, Callable]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    Random: (Random.getstate, Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, 'state', state),
    ),
}


class Order:
    """The batches of indices that a loader reads, pass after pass; a pass can begin at any batch.

    Reading the batches that are left out draws no random numbers. Random augmentation in worker
    processes depends only on the seed, the rank, the pass and the index of the batch, not on the
    number of workers or on where a run began.
    """

    def __init__(self, batches: Any, sampler: Any) -> None:
        self.batches, self.sampler = batches, sampler
        #: Adds the seed of a batch for workers: called with the batch, its pass and its index.
        self.add_seed: Optional[Callable[[Sequence, int, int], Sequence]] = None
        #: Whether each pass passes its number to the sampler: who reads may count from 0 again.
        self.sets_epoch = False
        #: How many passes were begun, and the number of the newest that has given a batch.
        self.passes, self.begun = 0, -1
        #: The random state of the host when that one began.
        self.start: object = None
        #: How many batches were drawn from the sampler, and how many before that pass.
        self.drawn = self.drawn_before = 0
        #: What sampler and batch sampler were built with, and what they had when that pass began.
        self._built = [_values_of(sampler), _values_of(batches)]
        self.kept_before: List[StateDict] = []
        #: Of the next pass: batches, then samples to leave out, and epoch and random state.
        self.resumed: Optional[Tuple[int, int, Optional[int], Any]] = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[object]:
        # A generator: this runs when the first batch is asked for. PyTorch calls it twice for a
        # pass with workers, and reads the second.
        resumed, self.resumed = self.resumed, None
        number, skip, drop = self.passes - 1, 0, 0
        if resumed is None:
            if self.sets_epoch:
                self.sampler.set_epoch(number)
            self.kept_before = self.kept()
            self.start = host_random_state()
            batches = iter(self.batches)
        else:
            skip, drop, epoch, start = resumed
            now = host_random_state()
            # Not earlier: DistSamplerSeedHook sets the epoch of the loop, which is always 0 in
            # one over iterations.
            if epoch is not None and hasattr(self.sampler, 'set_epoch'):
                self.sampler.set_epoch(epoch)
            set_host_random_state(start or now)
            self.start, self.kept_before = start or now, self.kept()
            batches = iter(self.batches)
            # One at least: samplers draw when their first index is asked for.
            ahead = deque(islice(batches, max(skip, 1)), maxlen=1)
            batches = batches if skip else chain(ahead, batches)
            set_host_random_state(now)
        self.begun, self.drawn_before = number, self.drawn
        self.drawn += skip
        for index, batch in enumerate(batches, skip):
            self.drawn += 1
            if drop and index == skip:
                batch = batch[drop:]
                if not batch:  # an incomplete one, which was trained on
                    continue
            if self.add_seed is not None and isinstance(batch, (list, tuple)):
                batch = self.add_seed(batch, number, index)
            yield batch

    def kept(self) -> List[StateDict]:
        """Attributes and generators of both samplers that changed and stay for the next pass."""
        if draws_on(self.sampler):
            return []  # all of its batches are drawn again
        return [
            {k: v for k, v in now.items() if pickle.dumps(v) != pickle.dumps(built.get(k))}
            for now, built in zip(map(_values_of, (self.sampler, self.batches)), self._built)
        ]

    def keep(self, kept: Sequence[StateDict]) -> None:
        """Restore what :meth:`kept` has returned in an earlier run."""
        for each, states in zip((self.sampler, self.batches), kept):
            for name, state in states.items():
                held = getattr(each, name, None)
                put = next((_GENERATORS[k][1] for k in _GENERATORS if isinstance(held, k)), None)
                if put is None:
                    vars(each)[name] = state
                else:
                    put(held, state)


def _values_of(sampler: object) -> StateDict:
    found = {}
    for name, value in getattr(sampler, '__dict__', {}).items():  # a list has none
        if _is_small(value):
            found[name] = copy.deepcopy(value)
        for kind, (get, _) in _GENERATORS.items():
            if isinstance(value, kind):
                found[name] = get(value)
    return found


def _is_small(value: object, most: int = 1000) -> bool:
    if isinstance(value, (list, tuple)) and len(value) <= most:
        return all(_is_small(each, most // (len(value) + 1)) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def draws_on(sampler: object) -> bool:
    """Whether a sampler goes on where the last pass has left it, as MMEngine's InfiniteSampler."""
    held = list(getattr(sampler, '__dict__', {}).values())
    for each in list(held):
        held += each.values() if isinstance(each, dict) else ()
    return any(map(isgenerator, held))


def sampler_of(loader: object) -> Any:
    """Return the sampler that shuffles: that of the batch sampler, or of the data loader."""
    batches = getattr(loader, 'batch_sampler', None)
    return getattr(batches, 'sampler', None) or getattr(loader, 'sampler', None)


def build_sampler(loader: Any, config: object, seed: Optional[int]) -> Any:
    """Build the sampler of a loader again from its config; None if the config has none."""
    sampler = config.get('sampler') if isinstance(config, Mapping) else None
    if not isinstance(sampler, Mapping):
        return None
    defaults = dict(dataset=loader.dataset, seed=seed)
    return DATA_SAMPLERS.build(copy.deepcopy(dict(sampler)), default_args=defaults)


def build_batch_sampler(loader: Any, config: Any, sampler: Sampler) -> Any:
    """Build the batch sampler of a loader again from its config, over a sampler."""
    batches = config.get('batch_sampler')
    if not isinstance(batches, Mapping):
        if loader.batch_size is None:  # the dataset gives batches, one for each index
            return sampler
        return BatchSampler(sampler, loader.batch_size, loader.drop_last)
    defaults = dict(sampler=sampler, batch_size=config.get('batch_size'))
    return DATA_SAMPLERS.build(copy.deepcopy(dict(batches)), default_args=defaults)
