"""Save and restore state in plain attributes of modules and hooks, which no ``state_dict`` holds.

Attributes are compared with what they were when training began; those that differ at a checkpoint
are saved with it. What is no plain value, or too large, is named in a warning once.
"""

import copy
import random
import re
from collections import Counter, OrderedDict, defaultdict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple
from weakref import ref

import numpy as np
import torch
from mmengine.hooks import CheckpointHook, Hook
from mmengine.model import is_model_wrapper
from torch import Tensor, nn

from mmdevplug.accelerators import rank_device
from mmdevplug.utils.annotations import AnyRunner
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.model import unwrap_model

from .participants import keeps_state, named_hooks

#: Of one attribute: more would make checkpoints large, and is a cache more often than a state.
MOST_BYTES = 16 * 2**20
_MOST_PARTS = 10_000
_MOST_LEVELS = 3
_MOST_OBJECTS = 100

_SCALARS = {type(None), bool, int, float, complex, str, bytes}
_DICTS = {dict, OrderedDict, defaultdict, Counter}
_SERIES = {list, tuple, set, frozenset, deque, torch.Size}
#: Packages whose objects are built anew, restored elsewhere, or hold no state of training.
_LIBRARIES = {
    *('mmengine', 'torch', 'numpy', 'mmdevplug', 'accelerate', 'builtins', 'enum', 'functools'),
    *('logging', 'threading', '_thread', 'multiprocessing'),
}
_NO_STATE = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(torch.device, torch.dtype, torch.memory_format, torch.layout),
)
#: Of every module, and what mmdet's dense heads compute in every iteration.
_OF_MODULES = {*vars(nn.Module()), '_raw_positive_infos'}
#: Of mmdet's hooks that replace the pipeline of the training data, once: they do it again.
_OF_HOOKS = {'_has_switched', '_restart_dataloader'}
_MISSING = object()
#: In place of the path of an owner: which parameters a hook has unfrozen or frozen.
_TRAINED = 'requires_grad'


class Owner(NamedTuple):
    """A module, a hook or an object that one of them holds."""

    path: str
    value: Any
    attributes: Dict[str, Any]
    #: Whether it belongs to a hook that is called after the one that saves.
    late: bool


class PlainState:
    """The plain attributes of a runner's model and hooks, compared with those at the start.

    Args:
        runner (Runner): Before training begins, and before anything is restored.
    """

    def __init__(self, runner: AnyRunner) -> None:
        self._runner = runner
        self._first = {owner.path: _marks(owner) for owner in _owners(runner)}
        self._first_trained = self._trained()
        self._warned: Set[str] = set()

    def state_dict(self) -> Dict[str, Dict[str, Any]]:
        """By path of its owner and name, what has changed and can be saved, on the host.

        Each value comes with whether its tensors were on the device.
        """
        found: Dict[str, Dict[str, Any]] = {}
        left: List[str] = []
        for owner in _owners(self._runner):
            if owner.path not in self._first and not isinstance(owner.value, nn.Module):
                continue  # made while training, as is what holds it
            first = self._first.get(owner.path, {})
            differ = {n for n, mark in _marks(owner).items() if first.get(n, _MISSING) != mark}
            unfit = {name for name in differ if owner.late or not _fits(owner, name)}
            if unfit:
                # What is filled at the first use belongs together: a flag or a key without its
                # cache would be wrong.
                unset = (_MISSING, _mark(None), _mark(False))
                unfit |= {name for name in differ if first.get(name, _MISSING) in unset}
            left += [
                f'{owner.path}.{name} ({type(owner.attributes[name]).__name__})'
                for name in sorted(unfit)
            ]
            for name in sorted(differ - unfit):
                value = owner.attributes[name]
                on_device = any(each.device.type != 'cpu' for each in _tensors(value))
                found.setdefault(owner.path, {})[name] = (on_device, value)
        self._warn_of(left)
        trained = self._trained().items() - self._first_trained.items()
        if trained:
            found[_TRAINED] = {name: (False, flag) for name, flag in sorted(trained)}
        return found

    def load_state_dict(self, saved: Dict[str, Dict[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned in an earlier run."""
        saved = dict(saved)
        parameters = dict(unwrap_model(self._runner.model).named_parameters())
        for name, (_, flag) in saved.pop(_TRAINED, {}).items():
            if name in parameters:
                parameters[name].requires_grad_(flag)
        for owner in list(_owners(self._runner)):
            for name, (on_device, value) in saved.pop(owner.path, {}).items():
                _put(owner, name, value, on_device)
        if saved:
            log_warning(
                f'The checkpoint holds states of {", ".join(sorted(saved))}, which this run does '
                f'not have when training begins. They are not restored.'
            )

    def _trained(self) -> Dict[str, bool]:
        model = unwrap_model(self._runner.model)
        return {name: p.requires_grad for name, p in model.named_parameters()}

    def copy(self) -> List[Tuple[Owner, str, Any, Any]]:
        """Copy all plain attributes, for :meth:`put_back`."""
        return [
            (owner, name, mark, copy.deepcopy(owner.attributes[name]))
            for owner in _owners(self._runner)
            for name, mark in _marks(owner).items()
            if _fits(owner, name)
        ]

    @staticmethod
    def put_back(copied: List[Tuple[Owner, str, Any, Any]]) -> None:
        """Restore those of the copied attributes that have changed since."""
        for owner, name, mark, value in copied:
            if _mark(_read(owner.value, name)) != mark:
                _put(owner, name, value, False)

    def _warn_of(self, left: List[str]) -> None:
        # Objects of one list share a name.
        named = dict.fromkeys(re.sub(r'\[.*?\]', '[...]', name) for name in left)
        new = [name for name in named if name not in self._warned]
        advice = (
            f' A resumed run begins with what the config builds: keep states in numbers, strings, '
            f'tensors or containers of these of at most {MOST_BYTES >> 20} MB, or give a hook '
            f'state_dict() and load_state_dict(); ignore caches.'
        )
        if new:
            said = f'Changes while training and is not saved: {", ".join(new)}.'
            log_warning(said if self._warned else said + advice)
        self._warned.update(new)


def _owners(runner: AnyRunner) -> Iterator[Owner]:
    """Walk over the modules of a model, its hooks, and the plain objects that they hold."""
    seen: Set[int] = set()
    todo: List[Tuple[str, Any, int, bool]] = []
    late = False
    for name, hook in named_hooks(runner):
        # Others save their state.
        if not keeps_state(hook):
            todo.append((f'hook {name}', hook, 0, late))
        late = late or isinstance(hook, CheckpointHook)
    todo.append(('model', unwrap_model(runner.model), 0, False))
    while todo:
        path, value, level, late = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and is_model_wrapper(value):
            todo.append((path, value.module, level, late))
            continue
        attributes = _attributes(value)
        if isinstance(value, nn.Module):
            children = [
                (f'{path}.{n}', c, level, late) for n, c in value._modules.items() if c is not None
            ]
            todo += reversed(children)
        yield Owner(path, value, attributes, late)
        if level < _MOST_LEVELS:
            for name, held in attributes.items():
                todo += [
                    (f'{path}.{name}{at}', part, level + 1, late) for at, part in _objects(held)
                ]


def _attributes(value: object) -> Dict[str, Any]:
    """The attributes of a module, a hook or an object that may be a state of training."""
    package = type(value).__module__.split('.')[0]
    if package == 'mmdevplug' or (package == 'mmengine' and isinstance(value, Hook)):
        return {}
    left_out: Set[str] = set()
    found = dict(vars(value))
    if isinstance(value, nn.Module):
        left_out = _OF_MODULES
        found.update((name, value._buffers[name]) for name in value._non_persistent_buffers_set)
    elif isinstance(value, Hook):
        left_out = set(_OF_HOOKS)
        # What the methods of MMEngine's own hooks name is theirs.
        for kind in type(value).__mro__:
            if kind is not Hook and kind.__module__.split('.')[0] in ('mmengine', 'mmdevplug'):
                codes = [getattr(each, '__code__', None) for each in vars(kind).values()]
                left_out.update(name for code in codes if code for name in code.co_names)
    return {name: each for name, each in found.items() if name not in left_out}


def _objects(value: Any, at: str = '') -> Iterator[Tuple[str, Any]]:
    """The objects of plain Python classes, and modules, in an attribute, with their places."""
    if isinstance(value, nn.Module) or _is_plain_object(value):
        yield at, value
    elif type(value) in (list, tuple) and len(value) < _MOST_OBJECTS and len(at) < 64:
        for index, part in enumerate(value):
            yield from _objects(part, f'{at}[{index}]')
    elif type(value) in _DICTS and len(value) < _MOST_OBJECTS and len(at) < 64:
        for key, part in value.items():
            yield from _objects(part, f'{at}[{key!r:.20}]')


def _is_plain_object(value: object) -> bool:
    if isinstance(value, _NO_STATE) or not hasattr(value, '__dict__'):
        return False
    kinds = [kind for kind in type(value).__mro__ if kind is not object]
    return not any(kind.__module__.split('.')[0] in _LIBRARIES for kind in kinds)


class _Same:
    """Equal to a mark of the same object; a tensor must not have been written to since."""

    def __init__(self, value: Any) -> None:
        is_tensor = isinstance(value, Tensor)
        self._get = ref(value) if is_tensor else lambda: value
        self._version = value._version if is_tensor and not value.is_inference() else None

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return (
            isinstance(other, _Same)
            and mine is not None
            and mine is other._get()
            and self._version == other._version
        )

    __hash__ = object.__hash__


def _marks(owner: Owner) -> Dict[str, Any]:
    """What tells whether attributes have changed, of those that may be a state."""
    return {
        name: _mark(value) for name, value in owner.attributes.items() if not _is_no_state(value)
    }


def _is_no_state(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is not None  # computed in every iteration
    # Objects are walked over, with attributes of their own.
    return isinstance(value, (*_NO_STATE, nn.Module)) or _is_plain_object(value)


def _mark(value: Any, parts: Optional[List[int]] = None) -> Any:
    parts = [0] if parts is None else parts
    parts[0] += 1
    kind = type(value)
    if kind in _SCALARS:
        return kind, value if value == value else 'nan'
    if parts[0] > _MOST_PARTS:
        return _Same(value)
    if kind in _DICTS:
        return kind, [(_mark(key, parts), _mark(each, parts)) for key, each in value.items()]
    if kind in _SERIES:
        return kind, [_mark(each, parts) for each in value]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in 'biufcSU':
        return value.dtype.str, value.shape, value.tobytes() if value.nbytes < MOST_BYTES else 0
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return _Same(value)


def _fits(owner: Owner, name: str) -> bool:
    value = owner.attributes[name]
    if isinstance(owner.value, Hook) and type(value) is bool:
        return False  # a switch, e.g. for what the hook does once: it has to do it again
    return _size(value) <= MOST_BYTES


def _size(value: Any, level: int = 0) -> float:
    """How many bytes a plain value has, infinity if it is none."""
    kind = type(value)
    if kind in (str, bytes):
        return len(value)
    if kind in _SCALARS:
        return 8
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided:
        return float('inf') if value.is_quantized else value.numel() * value.element_size()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.nbytes if value.dtype.kind in 'biufcSU' else float('inf')
    if level > 8 or kind not in _DICTS | _SERIES:
        return float('inf')
    if getattr(value, 'default_factory', None) not in (None, *_SCALARS, *_DICTS, *_SERIES):
        return float('inf')
    parts = [*value.keys(), *value.values()] if kind in _DICTS else value
    return sum(8 + _size(part, level + 1) for part in parts)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in _DICTS | _SERIES:
        for part in value.values() if type(value) in _DICTS else value:
            yield from _tensors(part)


def _read(value: object, name: str) -> Any:
    return _place(value, name).get(name)


def _place(value: object, name: str) -> Dict[str, Any]:
    """The dict that holds an attribute, which not every class lets others set."""
    buffers = getattr(value, '_buffers', {})
    return buffers if name in buffers else vars(value)


def _put(owner: Owner, name: str, value: object, on_device: bool) -> None:
    now = _read(owner.value, name)
    if isinstance(now, Tensor) and isinstance(value, Tensor) and _alike(now, value):
        with torch.no_grad():
            now.copy_(value)  # others may refer to it
        return
    if on_device:
        device = now.device if isinstance(now, Tensor) else _device_of(owner.value)
        memo = {id(each): each.to(device) for each in _tensors(value)}
        value = copy.deepcopy(value, memo)
    _place(owner.value, name)[name] = value


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _device_of(value: object) -> torch.device:
    of_module = next(value.parameters(), None) if isinstance(value, nn.Module) else None
    return rank_device()[1] if of_module is None else of_module.device
