"""Let every loader of a runner resume where it was, also those that its loops do not know.

A loop of two loaders, or a hook with a loader, reads from them by itself: only the loader's own
iterator knows how far it has come.
"""

import copy
import sys
from collections import deque
from functools import wraps
from inspect import isgenerator
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple
from weakref import ref

from torch.utils.data import DataLoader

from mmdevplug.accelerators.random_states import host_random_state, set_host_random_state
from mmdevplug.data import make_resumable
from mmdevplug.data.resumable_loader import ResumableBatches, resumable_batches, sampler_of
from mmdevplug.data.stateful import at_next_start, start_silently, stateful_part
from mmdevplug.utils.logs import log_warning

from .states import restart_workers_silently


class OtherLoaders:
    """The loaders that a runner has built, by names that are the same in every run of a config."""

    def __init__(self) -> None:
        self._loaders: Dict[str, ref] = {}
        self._readers: Dict[str, Reader] = {}
        #: States of loaders that are not built yet, and the numbers of ranks then and now.
        self._waiting: Dict[str, Dict] = {}
        self._ranks = (1, 1)
        self._warned = False

    def noting(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function note the loaders that it builds."""

        @wraps(build)
        def built(*args: object, **kwargs: object) -> Any:
            loader = build(*args, **kwargs)
            self._add(f'{_kind(loader)}/{len(self._loaders) + 1}', loader)
            return loader

        return built

    def find_in(self, loop: Any, seed: Optional[int]) -> None:
        """Note loaders that a loop holds and that the runner did not build."""
        for name, value in vars(loop).items():
            parts = value if isinstance(value, (list, tuple)) else [value]
            for index, loader in enumerate(parts):
                known = any(each() is loader for each in self._loaders.values())
                if isinstance(loader, DataLoader) and not known:
                    make_resumable(loader, seed)
                    self._add(f'{type(loop).__name__}.{name}/{index + 1}', loader)

    def _add(self, name: str, loader: DataLoader) -> None:
        self._loaders[name] = ref(loader)
        if isinstance(loader, DataLoader):
            self._readers[name] = Reader(loader)
        state = self._waiting.pop(name, None)
        if state is not None:
            self._restore(name, state)

    def states(self, known: List[Any]) -> Dict[str, Dict]:
        """The states of all loaders that were read from, but those of the loops."""
        found, unknown = {}, list(self._waiting)
        for name, get in self._loaders.items():
            loader, reader = get(), self._readers.get(name)
            if loader is None or any(loader is each for each in known):
                continue
            state = None if reader is None else reader.state(loader)
            if state is not None:
                found[name] = state
            elif reader is None or reader.passes:
                unknown.append(name)
        if unknown and not self._warned:
            self._warned = True
            log_warning(
                f'Data loader(s) {", ".join(unknown)}: where they are is not saved, and a resumed '
                f'run begins with their first batch. Expected a loader of PyTorch with a batch '
                f'sampler, or state_dict() and load_state_dict() of it or of its iterable '
                f'dataset, built by runner.build_dataloader before training begins.'
            )
        return found

    def restore(self, states: Dict[str, Dict], ranks: Tuple[int, int]) -> None:
        """Restore states, now or when their loaders are built.

        Args:
            states (dict): What :meth:`states` returned.
            ranks (tuple): The number of ranks then and now.
        """
        self._waiting, self._ranks = dict(states), ranks
        for name in [name for name in states if name in self._loaders]:
            self._restore(name, self._waiting.pop(name))

    def _restore(self, name: str, state: Dict) -> None:
        loader = self._loaders[name]()
        if loader is not None and name in self._readers:
            self._readers[name].restore(name, loader, state, self._ranks)


class Reader:
    """Notes how far the newest iterator of a data loader has come."""

    def __init__(self, loader: DataLoader) -> None:
        #: How many iterators were begun, which persistent workers read one after another.
        self.passes = 0
        self._newest: Callable[[], Any] = lambda: None
        self._pass = 0
        #: The pass that was resumed, and how many of its batches were left out.
        self._resumed = (-1, 0)
        loader_of = ref(loader)  # no circle, which would keep workers alive

        def get_iterator() -> Any:
            started = loader_of()
            batches = resumable_batches(started)
            self.passes += 1
            self._pass = 0 if batches is None else batches.epoch + 1
            iterator = type(started)._get_iterator(started)
            self._newest = ref(iterator)
            return iterator

        vars(loader)['_get_iterator'] = get_iterator

    def state(self, loader: DataLoader) -> Optional[Dict]:
        """Where a loader is; None if it was not read from or cannot be resumed."""
        source, batches = stateful_part(loader), resumable_batches(loader)
        if not self.passes or (source is None and batches is None):
            return None
        workers_run = loader.persistent_workers and getattr(loader, '_iterator', None) is not None
        if source is not None:
            return dict(source=copy.deepcopy(source.state_dict()), workers_run=workers_run)
        assert batches is not None
        iterator = self._reading(loader)
        # Persistent workers begin further passes without a new iterator.
        this = batches.epoch if workers_run else self._pass
        left_out = self._resumed[1] if this == self._resumed[0] else 0
        delivered = None if iterator is None else int(iterator._num_yielded) + left_out
        endless = draws_on(loader)
        if delivered is not None and not endless and delivered >= len(batches):
            # Who reads may not have seen yet that the pass has ended.
            seen = workers_run or _has_ended(iterator)
            delivered = None if seen else delivered
        return dict(
            epoch=batches.epoch,
            delivered=delivered,
            current=this,
            drawn=_drawn(batches, this, delivered) if endless else 0,
            at_start=batches.state_at_start if this == batches.epoch else None,
            sampler_epoch=getattr(sampler_of(loader), 'epoch', None),
            batch_size=batch_size_of(loader),
            workers_run=workers_run,
        )

    def _reading(self, loader: DataLoader) -> Any:
        """The iterator of a pass that is under way; None if nobody holds one."""
        iterator = self._newest()
        if iterator is None or iterator is not getattr(loader, '_iterator', None):
            return iterator
        # The loader holds the iterator of persistent workers; does anyone else?
        holder = dict(only=_Probe())
        alone = holder['only']
        return None if sys.getrefcount(iterator) <= sys.getrefcount(alone) else iterator

    def restore(self, name: str, loader: DataLoader, state: Dict, ranks: Tuple[int, int]) -> None:
        """Let the next pass of a loader begin where it was."""
        source, batches = stateful_part(loader), resumable_batches(loader)
        begun = batches is None or batches.epoch >= 0 or loader.num_workers > 0
        if self._newest() is not None and begun:
            log_warning(
                f'Data loader {name} is read from before training is resumed, so it begins with '
                f'its first batch. Begin to read it in before_train or later.'
            )
            return
        if 'source' in state:
            if source is not None:
                source.load_state_dict(state['source'])
            return
        if batches is None:
            return
        batches.epoch = state['epoch']
        batches.sets_epoch = state['sampler_epoch'] == state['current'] > 0
        delivered, endless = state['delivered'], draws_on(loader)
        if endless:
            deque(islice(iter(batches.batches), state['drawn']), maxlen=0)
            batches.drawn = state['drawn']
        if state['workers_run']:
            restart_workers_silently(loader)
        if delivered is None:
            return
        size, (before, now) = batch_size_of(loader), ranks
        samples = delivered * (state['batch_size'] or 1) * before // now
        skip, drop = divmod(samples, size or 1)
        random_states: List[Any] = []

        def begin() -> None:
            random_states.append(host_random_state())
            sampler = sampler_of(loader)
            if state['sampler_epoch'] is not None and hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(state['sampler_epoch'])
            if state['at_start'] is not None:
                set_host_random_state(state['at_start'])

        def skipped() -> None:
            set_host_random_state(random_states.pop())

        batches.resume(state['current'], skip, begin, skipped, drop)
        self._resumed = (state['current'], skip)
        if self._newest() is None and not state['workers_run']:
            at_next_start(loader, start_silently)


class _Probe:
    """Referred to by a dict and a variable alone."""


def _has_ended(iterator: Any) -> bool:
    """Whether an iterator has said that there are no more batches."""
    if hasattr(iterator, '_shutdown'):  # of worker processes
        return iterator._shutdown
    return iterator._sampler_iter.gi_frame is None


def _drawn(batches: ResumableBatches, this: int, delivered: Optional[int]) -> int:
    """How many batches were drawn before the pass that is under way, or else of all passes."""
    return batches.drawn if delivered is None or this > batches.epoch else batches.drawn_before


def draws_on(loader: DataLoader) -> bool:
    """Whether a sampler goes on where the last pass has left it, as MMEngine's InfiniteSampler."""
    sampler = sampler_of(loader)
    return any(isgenerator(part) for part in _parts(getattr(sampler, '__dict__', {})))


def _parts(attributes: Dict[str, Any]) -> Iterator[Any]:
    for value in attributes.values():
        yield from value.values() if isinstance(value, dict) else [value]


def batch_size_of(loader: DataLoader) -> Optional[int]:
    """The number of samples of a batch, None if it is not known."""
    size = getattr(loader, 'batch_size', None)
    if size is None:
        size = getattr(getattr(loader, 'batch_sampler', None), 'batch_size', None)
    return size if isinstance(size, int) else None


def _kind(loader: DataLoader) -> str:
    return type(getattr(loader, 'dataset', loader)).__name__
