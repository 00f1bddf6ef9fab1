"""Collect and restore named objects that have ``state_dict`` and ``load_state_dict``.

Saving asks each for its state, and resuming gives each its own back. Every rank has states of its
own, which are gathered once: a checkpoint holds them as the bytes of a file for each rank.
"""

import copy
import io
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple
from weakref import WeakValueDictionary

import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import EarlyStoppingHook, Hook, SyncBuffersHook
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmdevplug.accelerators import rank_context
from mmdevplug.accelerators.random_states import random_state, set_random_state
from mmdevplug.data.resumable_loader import has_state, make_resumable
from mmdevplug.distributed.byte_exchange import gather_bytes
from mmdevplug.errors import CheckpointError, DevPlugError, first_line
from mmdevplug.patches.torch_load import last_read, safe_loading
from mmdevplug.utils.annotations import AnyLoop, AnyRunner, SavedState, StateDict, Stateful
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.loops import loaders_of, loops_of
from mmdevplug.utils.state_types import Maybe
from mmdevplug.version import __version__

from .host_copy import copy_to_host
from .refusals import refusal, refuse_other_types
from .writing import save_with_warning

#: The key in a checkpoint, and the version of its format.
KEY, VERSION = 'mmdevplug', 4
#: Participants whose state is useless to a job with another number of ranks.
_OF_ONE_RANK = ('random', 'buffers')
#: Names the loops that :meth:`Participants.check_replaced` asks for.
_REPLACED = 'replaced_loaders'
_OF_RUNNER = (*_OF_ONE_RANK, 'plain', 'train_loop', 'val_loop')
#: Attributes that MMEngine's own hooks change while training and cannot recompute.
_ATTRIBUTES = {
    EarlyStoppingHook: ('wait_count', 'best_score'),
    SyncBuffersHook: ('called_in_train',),
}


class Participants:
    """The participants of a runner, in the order in which they were added.

    Examples:
        >>> runner.add_participant('curriculum', curriculum)
    """

    def __init__(self) -> None:
        self._things: Dict[str, Stateful] = {}
        #: They get their states before anyone reads from them, and may be built again and again.
        self._loaders: WeakValueDictionary[str, Any] = WeakValueDictionary()
        #: States whose participants are not there yet.
        self.waiting: StateDict = {}
        #: Whether all others have got theirs.
        self._loops: Dict[str, AnyLoop] = {}
        self._begun = False
        self._built = 0
        self._unknown: Dict[int, str] = {}
        self._warned = False
        #: The loops whose loader had been replaced where the checkpoint was saved.
        self._replaced_before: List[str] = []

    def add(self, name: str, thing: Stateful) -> None:
        """Add a participant; one with a saved state gets it when training begins, or at once.

        Args:
            name (str): The same in every run of a config.
            thing (object): With ``state_dict()``, which returns numbers, strings, tensors, arrays
                and containers of these, and ``load_state_dict(state)``.

        Raises:
            CheckpointError: If it lacks a method, or the name is taken.
        """
        if not has_state(thing):
            raise CheckpointError(
                f'participant {name!r} is a {type(thing).__name__}; expected something with the '
                f'methods state_dict() and load_state_dict(state). Add them.'
            )
        kept = self._loaders if isinstance(thing, DataLoader) else self._things
        now = kept.get(name, thing)
        if now is not thing:
            raise CheckpointError(
                f'two participants are named {name!r}: a {type(now).__name__} and a '
                f'{type(thing).__name__}. Expected a name for each: choose another one.'
            )
        for other, each in list(kept.items()):
            if each is thing:  # a loader that a loop holds gets the name that it has there
                del kept[other]
        kept[name] = thing
        if self.waiting:
            self._give()

    def note_loaders(self, runner: AnyRunner) -> None:
        """Let a runner add the loaders that it builds."""
        # A static method, which does not know for which runner it builds.
        build = type(runner).build_dataloader

        @wraps(build)
        def build_and_add(*args: object, **kwargs: object) -> object:
            loader = build(*args, **kwargs)
            self._built += 1
            kind = type(getattr(loader, 'dataset', loader)).__name__
            self._add_loader(f'loader {kind}/{self._built}', loader)
            return loader

        runner.build_dataloader = build_and_add

    def add_loops(self, runner: AnyRunner) -> None:
        """Add the loops of a runner, and all loaders that they hold."""
        for kind, loop in loops_of(runner):
            self._loops[kind] = loop
            for index, loader in enumerate(loaders_of(loop)):
                make_resumable(loader, runner.seed)
                self._add_loader(f'{kind}_loader{f"/{index + 1}" if index else ""}', loader)
            if has_state(loop):
                self.add(f'{kind}_loop', loop)

    def _add_loader(self, name: str, loader: object) -> None:
        if has_state(loader):
            self.add(name, loader)
        else:
            self._unknown[id(loader)] = name

    def state_dict(self) -> StateDict:
        """The states of all participants that have one; all ranks take part."""
        states, unknown = dict(self.waiting), list(self._unknown.values())
        for name, loader in list(self._loaders.items()):
            state = loader.state_dict()
            if state is None:
                unknown.append(name)
            elif state:
                states[name] = state
        for name, thing in self._things.items():
            states[name] = thing.state_dict()
        replaced = self._replaced()
        if replaced:
            states[_REPLACED] = replaced
            unknown += [f'{kind}_loader (replaced while training)' for kind in replaced]
        if unknown and not self._warned:
            self._warned = True
            log_warning(
                f'Data loader(s) {", ".join(unknown)}: where they are is not saved, and a resumed '
                f'run begins with their first batch. Expected a loader of PyTorch with a batch '
                f'sampler, or state_dict() and load_state_dict() of it or of its iterable '
                f'dataset, built by runner.build_dataloader before training begins.'
            )
        return states

    def _replaced(self) -> List[str]:
        """The loops that read from a loader which was not there when training began."""
        known = {*map(id, self._loaders.values()), *self._unknown}
        return [
            kind
            for kind, loop in self._loops.items()
            if any(id(loader) not in known for loader in loaders_of(loop))
        ]

    def load_state_dict(self, states: SavedState) -> None:
        """Give loaders their states, before anyone reads from them, now or when they are built."""
        self._replaced_before = states.get(_REPLACED, [])
        self.waiting = {name: state for name, state in states.items() if name != _REPLACED}
        self._begun = False
        self._give()

    def check_replaced(self) -> None:
        """Say that a resumed run trains on the config's loader, which had been replaced before."""
        if 'train' in self._replaced_before and 'train' not in self._replaced():
            log_warning(
                'Resuming, but not exactly: the checkpoint was saved after the loader of the '
                'training loop had been replaced, and this run reads the one of the config again, '
                'with its data set and pipeline. A hook that replaces it in a single epoch '
                '(epoch == n) does not in a run that is resumed later: let it also do so there '
                '(epoch >= n).'
            )
        self._replaced_before = []

    def begin(self) -> None:
        """Give all others their states, when everything is built that training needs."""
        begin_anew = self._things.keys() - self.waiting.keys() - {*_OF_ONE_RANK}
        if begin_anew:
            log_warning(
                f'The config has participants whose states the checkpoint lacks, so they begin '
                f'anew: {", ".join(sorted(begin_anew))}.'
            )
        self._begun = True
        self._give()

    def keep(self) -> Callable[[], None]:
        """Return what restores the states that hooks, and what users have added, have now."""
        things = {k: v for k, v in self._things.items() if k not in _OF_RUNNER}
        states = copy.deepcopy({name: thing.state_dict() for name, thing in things.items()})

        def restore() -> None:
            for name, state in states.items():
                things[name].load_state_dict(state)

        return restore

    def _give(self) -> None:
        for name, thing in [*self._loaders.items(), *self._things.items()]:
            if name in self.waiting and (self._begun or isinstance(thing, DataLoader)):
                _load(name, thing, self.waiting.pop(name))


def _load(name: str, thing: Stateful, state: object) -> None:
    """Give a participant its state; name it where it cannot take it."""
    refuse_other_types(state, getattr(thing, 'state_types', None), last_read(), name)
    try:
        thing.load_state_dict(state)
    except DevPlugError:
        raise
    except Exception as error:
        raise refusal(
            last_read(),
            f'Cannot resume: the state of {name!r} in checkpoint {last_read()} does not fit: '
            f'{type(error).__name__}: {first_line(error)}.',
        ) from error


def warn_of_unused(states: Mapping[str, object]) -> None:
    """Name states of a checkpoint that nothing in this run has asked for."""
    if states:
        log_warning(
            f'The checkpoint holds states of {", ".join(sorted(states))}, which this run does not '
            f'have when training begins. They are not restored.'
        )


# the states of all ranks ------------------------------------------------------------------------


def gather_states(participants: Participants) -> StateDict:
    """Collect the states of all ranks for the key :data:`KEY`; all ranks take part."""
    stream = io.BytesIO()
    states = copy_to_host(participants.state_dict(), rank_context().accelerator)
    save_with_warning(states, stream, 'a state of this rank')
    ranks = [torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)]
    if get_world_size() > 1:
        ranks = gather_bytes(ranks[0], call_tag='states')
    return dict(version=VERSION, release=__version__, ranks=ranks)


def states_of_this_rank(saved: SavedState, filename: str) -> StateDict:
    """Unpack what :func:`gather_states` returned: of this rank, or of rank 0 for other jobs.

    Raises:
        CheckpointError: If another release has written it in another way.
    """
    if saved['version'] != VERSION:
        raise CheckpointError(
            f'checkpoint {filename} was written by mmdevplug {saved.get("release", "0.1.0")} with '
            f'states of version {saved["version"]!r}; expected version {VERSION}. Resume with '
            f'that release; or take the weights: load_from={filename!r}, without --resume.'
        )
    same = len(saved['ranks']) == get_world_size()
    states = unpack(saved['ranks'][get_rank() if same else 0], filename)
    return {name: each for name, each in states.items() if same or name not in _OF_ONE_RANK}


def unpack(packed: Tensor, filename: str) -> StateDict:
    """Unpack the states of one rank."""
    with safe_loading(filename):
        return torch.load(io.BytesIO(packed.cpu().numpy().tobytes()))


# hooks ------------------------------------------------------------------------------------------


def keeps_state(hook: Hook) -> bool:
    """Whether the state of a hook is saved by its methods, or is that of MMEngine's own hooks."""
    return has_state(hook) or isinstance(hook, tuple(_ATTRIBUTES))


def add_hooks(participants: Participants, runner: AnyRunner) -> None:
    """Add all hooks that keep a state."""
    for name, hook in named_hooks(runner):
        if has_state(hook):
            participants.add(f'hook {name}', hook)
        elif keeps_state(hook):
            kept = next(_ATTRIBUTES[kind] for kind in _ATTRIBUTES if isinstance(hook, kind))
            get = partial(lambda own, kept: {each: own[each] for each in kept}, vars(hook), kept)
            state = SimpleNamespace(state_dict=get, load_state_dict=vars(hook).update)
            participants.add(f'hook {name}', state)


def named_hooks(runner: AnyRunner) -> Iterator[Tuple[str, Hook]]:
    """All hooks with names that are the same in every run of a config."""
    counts: Dict[str, int] = {}
    for hook in runner.hooks:
        name = type(hook).__name__
        counts[name] = counts.get(name, 0) + 1
        yield f'{name}/{counts[name]}', hook


# random numbers and buffers ---------------------------------------------------------------------


class RandomStates:
    """The random states of this rank, which are restored when training is where it was."""

    state_types = dict(python='', numpy='', torch='', accelerator='', device=Maybe(''))
    _saved: Optional[StateDict] = None

    def state_dict(self, renew: bool = True) -> StateDict:
        """Note the states as they are now, for :meth:`restore`, too."""
        context = rank_context()
        if renew:
            context.accelerator.renew_rng()
        self._saved = random_state(context.accelerator, context.devices)
        return self._saved

    def load_state_dict(self, state: StateDict) -> None:
        """Take the states that :meth:`restore` is to restore."""
        self._saved = state

    def restore(self, only_lazy: bool = False) -> None:
        """Restore what was saved, noted or loaded last.

        Args:
            only_lazy (bool): Whether to restore that of a lazy device alone. It moves with
                executions, of which a resumed run may have other numbers in a validation.
        """
        context = rank_context()
        accelerator = context.accelerator
        if self._saved is None or (only_lazy and not accelerator.compilation.lazy):
            return
        state = self._saved
        if only_lazy:
            state = dict(random_state(accelerator, context.devices), device=state['device'])
        left = set_random_state(state, accelerator, context.devices)
        if left is not None and not only_lazy:
            log_warning(
                f'Random numbers on {context.device} differ from those of an uninterrupted run: '
                f'{left}.'
            )


class RankBuffers:
    """The buffers of a model and of its moving averages on all ranks but the first.

    Those of the first are saved as weights. Masks are constants.
    """

    inexact = ''
    state_types: Sequence[object] = ()

    def __init__(self, runner: AnyRunner) -> None:
        self._runner = runner

    def _buffers(self) -> List[Tensor]:
        averages = [getattr(hook, 'ema_model', None) for hook in self._runner.hooks]
        models = [self._runner.model, *(each for each in averages if isinstance(each, nn.Module))]
        return [each for one in models for each in one.buffers() if each.dtype != torch.bool]

    def state_dict(self) -> List[Tensor]:
        """The buffers."""
        return self._buffers() if get_rank() else []

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        """Restore them in a model of the same sizes."""
        buffers = self._buffers() if get_rank() else []
        if [each.shape for each in buffers] != [each.shape for each in state]:
            self.inexact = 'the model has other buffers than the checkpoint'
            return
        with torch.no_grad():
            for buffer, value in zip(buffers, state):
                buffer.copy_(value)
