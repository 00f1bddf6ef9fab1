"""Data loaders that count the batches they have yielded, and go on there in a resumed run."""

from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Tuple
from weakref import ref

import torch
from mmengine.dist import get_rank, get_world_size
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from mmdevplug.utils.annotations import SavedState, StateDict, Stateful
from mmdevplug.utils.loops import UNKNOWN
from mmdevplug.utils.state_types import Maybe

from .order import Order, build_batch_sampler, build_sampler, draws_on, sampler_of

if TYPE_CHECKING:
    from typing_extensions import TypeGuard


#: What a loop takes and drops in place of a batch that was trained on.
PLACEHOLDER = object()


class Reading:
    """An iterator over a loader, which counts what it yields."""

    def __init__(self, loader: 'ResumableLoader') -> None:
        self._loader, self.ended = loader, False
        #: How many batches a loop takes and drops, as it does not know that it goes on.
        self.placeholders = 0
        #: How many batches it has given.
        self.taken = 0
        self.begin()

    def begin(self) -> None:
        """Begin a pass where the loader says."""
        loader = self._loader
        loader._passes += 1
        if loader.order is not None:
            loader.order.passes = loader._passes
        self.yielded, loader._left_out = loader._left_out, 0
        next_in_line: Any = super(ResumableLoader, loader)
        self._inner = next_in_line.__iter__()

    def __iter__(self) -> 'Reading':
        return self

    def __next__(self) -> object:
        if self.placeholders > 0:
            self.placeholders -= 1
            return PLACEHOLDER
        if self._inner is None:
            self.begin()
        called, self._loader.before_next = self._loader.before_next, None
        if called is not None:
            called()
        try:
            batch = next(self._inner)
        except StopIteration:
            self.ended = True
            raise
        self.yielded += 1
        self.taken += 1
        return batch

    def __len__(self) -> int:
        return len(self._loader)


class ResumableLoader(DataLoader):
    """A data loader of PyTorch's with ``state_dict`` and ``load_state_dict``.

    :func:`make_resumable` mixes it into the class of a loader. Where a loader like torchdata's,
    or a stream without worker processes, has these methods itself, they are called.
    """

    state_types = dict(
        **dict(passes=0, yielded=Maybe(0), workers_run=False, ranks=0, batch_size=Maybe(0)),
        **dict(seed=Maybe(0), drawn=0, kept=[], sampler_seed=Maybe(0), sampler_epoch=Maybe(0)),
    )
    order: Optional[Order] = None
    #: The config that it was built from, and the runner's seed, for random numbers of workers.
    config: Mapping[str, object] = {}
    seed: Optional[int] = None
    #: Whether it has a length although its stream has none.
    unknown_length = False
    #: Called once before the next batch is loaded.
    before_next: Optional[Callable[[], object]] = None
    #: After :meth:`load_state_dict`: what is not as it was, and how many batches of the pass under
    #: way were yielded, None between two passes.
    inexact = ''
    resumed_at: Optional[int] = None
    #: Passes that were begun, and batches of the next one that are left out.
    _passes = _left_out = 0
    _silent = False
    _newest: Callable[[], Optional[Reading]] = staticmethod(lambda: None)

    def __iter__(self) -> Any:
        reading = Reading(self)
        self._newest = ref(reading)  # no circle, which would keep workers alive
        return reading

    def __len__(self) -> int:
        try:
            return super().__len__()
        except TypeError:
            if self.unknown_length:
                return UNKNOWN
            raise

    @property
    def _index_sampler(self) -> object:
        return super()._index_sampler if self.order is None else self.order

    def _get_iterator(self) -> Any:
        # A run that goes on has drawn the seed of this iterator already.
        generator = self.generator
        self.generator = torch.Generator() if self._silent else generator
        self._silent = False
        try:
            return super()._get_iterator()
        finally:
            self.generator = generator

    @property
    def has_place(self) -> bool:
        """Whether it or what it reads has an order, or a state."""
        return self.order is not None or self._source() is not None

    def _source(self) -> Any:
        """The object that saves its own position (torchdata's loader, a stream), or None."""
        if has_state(super()):
            return super()
        # With worker processes the dataset that is read is a copy in each of them.
        alone = isinstance(self.dataset, IterableDataset) and self.num_workers == 0
        return self.dataset if alone and has_state(self.dataset) else None

    def state_dict(self) -> Optional[StateDict]:
        """Where it is; nothing before it was read from, and None if that is not known."""
        if not self._passes:
            return {}
        reading, order, source = self._newest(), self.order, self._source()
        under_way = reading is not None and not reading.ended
        state = dict(
            passes=self._passes,
            yielded=reading.yielded if reading is not None and under_way else None,
            workers_run=getattr(self, 'persistent_workers', False) and bool(self._iterator),
            ranks=get_world_size(),
            batch_size=batch_size_of(self),
            seed=self.seed,
        )
        if source is not None:
            return dict(state, source=source.state_dict())
        if order is None:
            return None
        begun = under_way and order.begun == self._passes - 1
        drawn, kept = order.drawn, order.kept()
        if begun:
            drawn, kept = order.drawn_before, order.kept_before
        return dict(
            state,
            start=order.start if begun else None,
            drawn=drawn if draws_on(order.sampler) else 0,
            kept=kept,
            sampler_seed=getattr(order.sampler, 'seed', None),
            sampler_epoch=getattr(order.sampler, 'epoch', None),
        )

    def load_state_dict(self, state: SavedState) -> None:
        """Let the next pass, or one that has yielded nothing yet, go on where a loader was."""
        reading, source, yielded = self._newest(), self._source(), state['yielded']
        under_way = yielded is not None
        if reading is not None and not reading.ended:
            if reading.yielded:
                self.inexact = (
                    'a data loader is read from before training is resumed, so it goes on with '
                    'its next batch: begin to read it in before_train or later'
                )
                return
            # It begins again when its next batch is asked for.
            reading._inner = None
            vars(self)['_iterator'] = None
        self._passes = state['passes'] - under_way
        self.resumed_at = yielded
        self._silent = under_way or state['workers_run']
        if 'source' in state and source is not None and state['ranks'] == get_world_size():
            # torchdata's starts the pass that has ended, and then the next one.
            self._silent = self._silent or source is not self.dataset
            source.load_state_dict(state['source'])
            self._left_out = yielded or 0
        elif self.order is not None and 'drawn' in state:
            self._resume_order(self.order, state)
        elif yielded:
            self.inexact = 'the data loader has no batch sampler that can skip batches'

    def _resume_order(self, order: Order, state: SavedState) -> None:
        if self.seed is not None:
            self.seed = state['seed']
            self._seed_batches()
        # A new sampler: the one there is may have been read from already.
        sampler = build_sampler(self, self.config, state['sampler_seed'])
        if sampler is not None:
            order.sampler = sampler
            order.batches = build_batch_sampler(self, self.config, sampler)
            if self.batch_sampler is not None:
                vars(self)['batch_sampler'] = order.batches  # DataLoader's setter refuses
            if not isinstance(self.config.get('batch_sampler'), Mapping):
                vars(self)['sampler'] = sampler
        elif order.drawn and draws_on(order.sampler):
            self.inexact = f'{type(order.sampler).__name__} was read from before, by workers'
        counts = state['sampler_epoch'] == state['passes'] - 1 > 0
        order.sets_epoch = counts and hasattr(order.sampler, 'set_epoch')
        deque(islice(iter(order.batches) if state['drawn'] else (), state['drawn']), maxlen=0)
        order.drawn = state['drawn']
        order.keep(state.get('kept', []))
        if state['yielded'] is None:
            return
        start = state['start'] if state['ranks'] == get_world_size() else None
        skip, drop, differs = self._batches_to_skip(order, state)
        self.inexact = '; '.join(filter(None, (self.inexact, differs)))
        self.resumed_at = self._left_out = skip
        if skip or drop or start is not None:
            order.resumed = (skip, drop, state['sampler_epoch'], start)

    def _seed_batches(self) -> None:
        from .seeded_workers import derive_seed, seeded_batch

        # The seed may be the same on all ranks.
        if self.order is not None and self.seed is not None:
            self.order.add_seed = partial(seeded_batch, derive_seed(self.seed, get_rank()))

    def _batches_to_skip(self, order: Order, state: SavedState) -> Tuple[int, int, str]:
        """The batches that were yielded, of this job's size, samples of the next, what differs."""
        yielded, inexact = state['yielded'], []
        before = (state['batch_size'] or 1) * state['ranks']
        mine, ranks = batch_size_of(self) or 1, get_world_size()
        plain = type(order.batches) is BatchSampler
        if yielded and not plain and state['ranks'] != ranks:
            kind = type(order.batches).__name__
            inexact.append(f'{kind} forms other batches than on {state["ranks"]} rank(s)')
        if before == mine * ranks:
            return yielded, 0, '; '.join(inexact)
        skip, rest = divmod(yielded * before // ranks, mine)
        # Samplers deal samples out to the ranks in turn. One sample alone would be too few for
        # batch norm.
        drop = min(rest, max(0, mine - 2)) if plain else 0
        if yielded:
            inexact.append(
                f'batches had {before} samples on all ranks together and have {mine * ranks} now; '
                f'continuing after {(skip * mine + drop) * ranks} of {yielded * before} samples '
                f'of this epoch'
            )
        return skip, drop, '; '.join(inexact)


def make_resumable(
    loader: object, seed: Optional[int] = None, config: object = None
) -> Optional[ResumableLoader]:
    """Let a data loader of PyTorch's save and restore where it is.

    Args:
        loader (DataLoader): Changed in place, unless it was before; anything else is left alone.
        seed (int, optional): Of the runner, for random augmentation in workers. Defaults to None:
            workers are not seeded.
        config (dict, optional): What the loader was built from; its sampler is built again when
            the loader is resumed.

    Returns:
        ResumableLoader or None: The loader.
    """
    if not isinstance(loader, DataLoader):
        return None
    made: Any = loader
    if not isinstance(loader, ResumableLoader):
        made.__class__ = type(type(loader).__name__, (ResumableLoader, type(loader)), {})
        streams = isinstance(loader.dataset, IterableDataset)
        if not streams and made._source() is None:
            batches = made._index_sampler
            made.order = Order(batches, sampler_of(loader))
            if loader.num_workers > 0 and seed is not None:
                from .seeded_workers import WorkerInit

                made.seed = seed
                made._seed_batches()
                made.worker_init_fn = WorkerInit(made.worker_init_fn)
    if isinstance(config, Mapping):
        made.config = config
    return made


def has_state(thing: object) -> 'TypeGuard[Stateful]':
    """Whether something has the two methods by which a state is saved and restored."""
    return hasattr(thing, 'state_dict') and hasattr(thing, 'load_state_dict')


def batch_size_of(loader: object) -> Optional[int]:
    """The number of samples of a batch, None if it is not known."""
    size = getattr(loader, 'batch_size', None)
    if size is None:
        size = getattr(getattr(loader, 'batch_sampler', None), 'batch_size', None)
    return size if isinstance(size, int) else None
