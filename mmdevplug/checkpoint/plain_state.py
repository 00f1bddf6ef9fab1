"""Save and restore state in plain attributes of modules, hooks and loops, outside ``state_dict``.

Attributes are compared with what they were when training began; those that differ at a checkpoint
are saved with it. What is no plain value, or too large, is named in a warning once.
"""

import copy
import pickle
import random
import re
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from math import inf
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Set, Tuple
from weakref import ref

import numpy as np
import torch
from mmengine.hooks import (
    CheckpointHook,
    EMAHook,
    Hook,
    IterTimerHook,
    LoggerHook,
    ProfilerHook,
    RuntimeInfoHook,
)
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import BaseLoop
from torch import Tensor, nn

from mmdevplug.accelerators import rank_context
from mmdevplug.data.resumable_loader import has_state
from mmdevplug.utils.annotations import AnyRunner, SavedState, StateDict
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.loops import loops_of

from .host_copy import find_leaves
from .participants import keeps_state, named_hooks, warn_of_unused
from .weights import is_weight, memory_of, parts_of, weight_sums

#: The largest attribute that is saved. Larger ones are more often a cache than a state.
MOST_BYTES = 16 * 2**20
_MOST_PARTS = MOST_BYTES // 8  # a container counts at least 8 bytes for each item
_MOST_LEVELS = 3
_MOST_OBJECTS = 100

_SCALARS = {type(None), bool, int, float, complex, str, bytes}
_DICTS = {dict, OrderedDict, defaultdict, Counter}
_SERIES = {list, tuple, set, frozenset, deque, torch.Size}
#: Packages whose objects are built anew, restored elsewhere, or hold no state of training.
_LIBRARIES = {
    *('mmengine', 'torch', 'numpy', 'mmdevplug', 'accelerate', 'builtins', 'enum', 'functools'),
    *('logging', 'threading', '_thread', 'multiprocessing', 'random'),
}
_NO_STATE = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(torch.device, torch.dtype, torch.memory_format, torch.layout),
)
#: The generators of the whole process, which mmdet's samplers hold. They are saved by themselves.
_OF_PROCESS = (random._inst, np.random.mtrand._rand, torch.default_generator)
#: Attributes of every module, and one that mmdet's dense heads compute in every iteration.
_OF_MODULES = {*vars(nn.Module()), '_raw_positive_infos'}
#: Flags of mmdet's hooks that switch the pipeline of the training data once. They are not
#: restored, so that the hook switches again.
_OF_HOOKS = {'_has_switched', '_restart_dataloader'}
#: Attributes that MMEngine's hooks change while training and set again when a run begins; skipped
#: in subclasses, too.
_OF_MMENGINES_HOOKS: Dict[type, Tuple[str, ...]] = {
    CheckpointHook: ('best_ckpt_path', 'best_ckpt_path_dict', 'keep_ckpt_ids', 'last_ckpt'),
    EMAHook: ('ema_model', 'src_model'),
    IterTimerHook: ('start_iter', 't', 'time_sec_test_val', 'time_sec_tot'),
    LoggerHook: ('json_log_path', 'out_dir'),
    ProfilerHook: ('profiler', '_closed'),
    RuntimeInfoHook: ('last_loop_stage',),
}
#: Attributes of MMEngine's loops, which it saves, takes from the config or fills again.
_OF_LOOPS = {
    *('_runner', 'dataloader', 'dataloader_iterator', 'evaluator', 'fp16', 'val_loss'),
    *('_epoch', '_iter', '_max_epochs', '_max_iters', 'stop_training', 'runs_as_mmengine'),
    *('val_begin', 'val_interval', 'dynamic_milestones', 'dynamic_intervals'),
}
#: Fingerprints of an attribute that is missing or has not been set yet.
_UNSET = (None, (type(None), None), (bool, False))
#: The name under which it is saved which parameters of a module are trained.
_TRAINED = 'requires_grad of parameters'
#: The name of the parameters and buffers of a module that is no part of the runner's model, such
#: as a teacher that a hook keeps. They are compared, not saved: each rank would save all of them.
_WEIGHTS = 'weights and buffers'


class Owner(NamedTuple):
    """A module, a hook, a loop or an object that one of them holds."""

    path: str
    value: Any
    attributes: Dict[str, object]
    #: Whether it belongs to a hook that is called after the one that saves.
    late: bool


class PlainState:
    """The plain attributes of a runner's model, hooks and loops, compared with those at the start.

    Args:
        runner (Runner): Before training begins, and before anything is restored.
    """

    def __init__(self, runner: AnyRunner) -> None:
        self._runner = runner
        self._first = {owner.path: _marks(owner) for owner in _owners(runner)}
        self._warned: Set[str] = set()

    def state_dict(self) -> Dict[str, StateDict]:
        """By path of its owner and name, what has changed and can be saved, on the host.

        Each value comes with whether its tensors were on the device.
        """
        changed: Dict[str, StateDict] = {}
        not_saved: Dict[str, None] = {}
        weights = memory_of(self._runner.model)
        for owner in _owners(self._runner):
            if owner.path not in self._first and not isinstance(owner.value, nn.Module):
                continue  # created during training, so it cannot be restored by path
            first, marks = self._first.get(owner.path, {}), _marks(owner)
            differ = sorted(name for name in marks if first.get(name) != marks[name])
            unfit = {
                name for name in differ if name != _WEIGHTS and (owner.late or not marks[name][1])
            }
            for name in differ:
                value = owner.attributes[name]
                if is_weight(value, weights):
                    continue  # saved with the model
                if _is_switch(owner, name, value):
                    changed.setdefault(owner.path, {})[name] = (False, value)
                    continue
                # Attributes that the first use fills, such as a cache and the flag that says so,
                # are left out together: a restored flag would promise a cache that is not there.
                lost = name in unfit or name == _WEIGHTS
                if lost or (unfit and first.get(name, (None,))[0] in _UNSET):
                    # All objects of a list share one name in the warning.
                    path = re.sub(r'\[.*?\]', '[...]', owner.path)
                    not_saved[f'{path}.{name} ({type(value).__name__})'] = None
                    continue
                on_device = any(tensor.device.type != 'cpu' for tensor in _tensors(value).values())
                changed.setdefault(owner.path, {})[name] = (on_device, value)
        new = [tensor for tensor in not_saved if tensor not in self._warned]
        if new:
            log_warning(
                f'Changes while training and is not saved: {", ".join(new)}. A resumed run begins '
                f'with what the config builds: keep states in numbers, strings, tensors or '
                f'containers of these of at most {MOST_BYTES >> 20} MB, weights in modules of the '
                f'model, or give a hook or loop state_dict() and load_state_dict(); ignore caches.'
            )
        self._warned.update(new)
        return changed

    def load_state_dict(self, saved: Mapping[str, SavedState]) -> None:
        """Restore what :meth:`state_dict` returned in an earlier run."""
        left, skipped, weights = dict(saved), [], memory_of(self._runner.model)
        for owner in list(_owners(self._runner)):
            for name, (on_device, value) in left.pop(owner.path, {}).items():
                if _is_switch(owner, name, value):
                    skipped.append(f'{owner.path}.{name}={value}')
                else:
                    _put(owner, name, value, on_device, weights)
        if skipped:
            print_log(
                f'Not restored: {", ".join(skipped)}. Such a name may say what this process has '
                f'yet to do, such as registering hooks. For a state of training, give a module a '
                f'name without _ or a buffer, and a hook state_dict() and load_state_dict().',
                'current',
            )
        warn_of_unused(left)

    def keep(self) -> Callable[[], None]:
        """Return what restores plain attributes that change from now on."""
        before = [
            (owner, name, mark, copy.deepcopy(owner.attributes[name]))
            for owner in _owners(self._runner)
            for name, (mark, fits) in _marks(owner).items()
            if fits and not _is_switch(owner, name, owner.attributes[name])
        ]

        def restore() -> None:
            weights = memory_of(self._runner.model)
            for owner, name, mark, value in before:
                if _examine(_place(owner.value, name).get(name))[0] != mark:
                    _put(owner, name, value, False, weights)

        return restore


def _owners(runner: AnyRunner) -> Iterator[Owner]:
    """Walk over the modules of a model, its hooks and loops, and the plain objects they hold."""
    seen: Set[int] = set()
    of_model = set(map(id, parts_of(runner.model)))
    todo: List[Tuple[str, object, int, bool]] = []
    for name, loop in loops_of(runner):
        if not has_state(loop):
            todo.append((f'{name}_loop', loop, 0, False))
    late = False
    for name, hook in named_hooks(runner):
        if not keeps_state(hook):  # those with a state_dict() save their state themselves
            todo.append((f'hook {name}', hook, 0, late))
        late = late or isinstance(hook, CheckpointHook)
    todo.append(('model', runner.model, 0, False))
    while todo:
        path, value, level, late = todo.pop()
        while isinstance(value, nn.Module) and is_model_wrapper(value):
            value = value.module
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        attributes = _attributes(value)
        if isinstance(value, nn.Module) and id(value) not in of_model:
            of_model.update(map(id, parts_of(value)))  # those in it have no line of their own
            attributes[_WEIGHTS] = value
        yield Owner(path, value, attributes, late)
        for name, child in (value._modules if isinstance(value, nn.Module) else {}).items():
            todo.append((f'{path}.{name}', child, level, late))
        for name, held in attributes.items() if level < _MOST_LEVELS else ():
            for at, part in _objects(held):
                todo.append((f'{path}.{name}{at}', part, level + 1, late))


def _attributes(value: object) -> Dict[str, object]:
    """The attributes of a module, a hook, a loop or an object that may be a state of training."""
    package = type(value).__module__.split('.')[0]
    of_ours = package == 'mmdevplug' or (
        package == 'mmengine' and isinstance(value, (Hook, BaseLoop))
    )
    left_out: Set[str] = set()
    attributes = {} if of_ours else dict(vars(value))
    if isinstance(value, nn.Module):
        left_out = _OF_MODULES
        attributes[_TRAINED] = {
            n: p.requires_grad for n, p in value._parameters.items() if p is not None
        }
        for name in value._non_persistent_buffers_set:
            attributes[name] = value._buffers[name]
    elif isinstance(value, Hook):
        left_out = set(_OF_HOOKS)
        for kind, names in _OF_MMENGINES_HOOKS.items():
            if isinstance(value, kind):
                left_out.update(names)
    elif isinstance(value, BaseLoop):
        # Where an iterator is, is saved with its loader.
        iterators = {name for name, each in attributes.items() if isinstance(each, Iterator)}
        left_out = _OF_LOOPS | iterators
    for name in left_out & attributes.keys():
        del attributes[name]
    return attributes


def _objects(value: Any, index: str = '') -> Iterator[Tuple[str, object]]:
    """The objects of plain Python classes, and modules, in an attribute, with their places."""
    if isinstance(value, nn.Module) or _is_plain_object(value):
        yield index, value
    elif type(value) in {list, tuple, *_DICTS} and len(value) < _MOST_OBJECTS and len(index) < 64:
        for key, item in value.items() if type(value) in _DICTS else enumerate(value):
            yield from _objects(item, f'{index}[{_short(repr(key))}]')


def _short(key: str, most: int = 20) -> str:
    """Shorten a key; keys that begin alike, as names of layers do, stay different."""
    return key if len(key) <= most else f'{key[:most]}~{zlib.crc32(key.encode()):x}'


def _is_plain_object(value: object) -> bool:
    if isinstance(value, _NO_STATE) or not hasattr(value, '__dict__'):
        return False
    for kind in type(value).__mro__[:-1]:
        if kind.__module__.split('.')[0] in _LIBRARIES:
            return False
    return True


class _Same:
    """Compare an object by identity, a tensor also by its version."""

    def __init__(self, value: Any) -> None:
        is_tensor = isinstance(value, Tensor)
        self._get = ref(value) if is_tensor else lambda: value
        self._version = value._version if is_tensor and not value.is_inference() else None

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        if mine is None or not isinstance(other, _Same):
            return False
        return mine is other._get() and self._version == other._version

    __hash__ = object.__hash__


def _marks(owner: Owner) -> Dict[str, Tuple[object, bool]]:
    """Fingerprint each attribute that may be a state; say whether it is small enough to save."""
    marks: Dict[str, Tuple[object, bool]] = {}
    for name, value in owner.attributes.items():
        if name == _WEIGHTS:
            marks[name] = weight_sums(owner.value), False
            continue
        # The walk yields plain objects by themselves. Tensors with a graph are computed again.
        walked = isinstance(value, nn.Module) or _is_plain_object(value)
        if not (walked or isinstance(value, _NO_STATE) or getattr(value, 'grad_fn', None)):
            mark, size = _examine(value)
            marks[name] = mark, size <= MOST_BYTES
    return marks


def _is_switch(owner: Owner, name: str, value: object) -> bool:
    """Whether an attribute may be a flag for work that a new process has to do again.

    A bool of a hook may be one, and a bool of a module whose name begins with ``_``.
    """
    private = isinstance(owner.value, Hook) or name.startswith('_')
    return private and type(value) is bool


def _examine(value: Any, most: int = _MOST_PARTS) -> Tuple[object, float]:
    """Return the fingerprint of a value and its size in bytes, infinity if it cannot be saved.

    Containers with more than ``most`` items are compared by identity.
    """
    kind = type(value)
    size: float
    if kind in _SCALARS:
        size = len(value) if kind in (str, bytes) else 8
        return (kind, value if value == value else 'nan'), size
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        return _Same(value), value.numel() * value.element_size()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in 'biufcSU':
        data = value.tobytes() if value.nbytes < MOST_BYTES else None
        return (value.dtype.str, value.shape, data), value.nbytes
    if kind in _DICTS | _SERIES and len(value) <= most:
        marks, size = [], 0.0
        for item in [*value.keys(), *value.values()] if kind in _DICTS else value:
            mark, of_part = _examine(item, most // (len(value) + 1))
            marks.append(mark)
            size += 8 + of_part
        factory = getattr(value, 'default_factory', None)
        return (kind, marks), size if factory in (None, *_SCALARS, *_DICTS, *_SERIES) else inf
    if any(value is each for each in _OF_PROCESS):
        return _Same(value), inf
    if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
        return pickle.dumps(value), inf
    if isinstance(value, torch.Generator):
        return value.get_state().tolist(), inf
    return _Same(value), inf


def _tensors(value: object) -> Dict[int, Tensor]:
    leaves = find_leaves(value, {}, set())
    return {key: leaf for key, leaf in leaves.items() if isinstance(leaf, Tensor)}


def _place(value: object, name: str) -> Dict[str, object]:
    """The dict that holds an attribute, which not every class lets others set."""
    buffers = getattr(value, '_buffers', {})
    return buffers if name in buffers else vars(value)


def _put(owner: Owner, name: str, value: Any, on_device: bool, weights: Set[int]) -> None:
    if name == _TRAINED:
        for parameter in value.keys() & owner.value._parameters.keys():
            owner.value._parameters[parameter].requires_grad_(value[parameter])
        return
    place = _place(owner.value, name)
    now, is_tensor = place.get(name), isinstance(value, Tensor)
    if (
        isinstance(now, Tensor)
        and is_tensor
        and (now.shape, now.dtype) == (value.shape, value.dtype)
        and not is_weight(now, weights)
    ):
        with torch.no_grad():
            now.copy_(value)  # in place: other objects may refer to this tensor
        return
    if on_device:
        module = owner.value if isinstance(owner.value, nn.Module) else nn.Module()
        like = now if isinstance(now, Tensor) else next(module.parameters(), None)
        device = rank_context().device if like is None else like.device
        moved = {key: each.to(device) for key, each in _tensors(value).items()}
        value = copy.deepcopy(value, moved)
    place[name] = value
