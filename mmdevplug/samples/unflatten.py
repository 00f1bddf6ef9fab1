"""Rebuild samples from received structures: everything is checked, and no received code is run.

The classes that a message names (named tuples, dataclasses, MMEngine's data elements) must have
been imported by this process. Objects are created without their constructors.
"""

import pickle
import sys
from collections import OrderedDict
from io import BytesIO
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from mmdevplug.errors import SampleError
from mmdevplug.utils.pytree import DATACLASS, DICT, ELEMENT, LIST, NAMED_TUPLE, TUPLE, container_of

from .structures import ARRAY_KINDS, MOST_LEVELS

_BUILT_IN = {
    'dict': (dict, DICT),
    'OrderedDict': (OrderedDict, DICT),
    'list': (list, LIST),
    'tuple': (tuple, TUPLE),
}
_TEXTS = {'str': np.str_, 'bytes': np.bytes_}
_NAMED = {each.name: each for each in (NAMED_TUPLE, DATACLASS, ELEMENT)}


class BlockType(NamedTuple):
    """The type of a block: of a tensor, or of an array, whose bytes are sent as uint8."""

    dtype: torch.dtype
    itemsize: int
    is_array: bool


#: Builds a value from the next plain values and the next blocks, which come with their shapes.
Build = Callable[[Iterator[Any], Iterator[Tuple[Tensor, Tuple[int, ...]]]], Any]


class Plan(NamedTuple):
    """How to build samples of one structure, from which plain values and blocks."""

    build: Build
    values: List[str]  # the leaves that take a plain value
    blocks: List[BlockType]

    @classmethod
    def of(cls, structure: Any, allow_pickle: bool) -> 'Plan':
        """Read a structure of ``FlatSamples``; raise SampleError if it is invalid or unknown."""
        planner = _Planner(allow_pickle)
        return cls(planner.plan(structure, 0), planner.values, planner.blocks)


class _Planner:
    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self.values: List[str] = []
        self.blocks: List[BlockType] = []

    def plan(self, structure: Any, level: int) -> Build:
        if isinstance(structure, str):
            return self._plan_leaf(structure)
        if not isinstance(structure, (list, tuple)) or len(structure) != 4 or level > MOST_LEVELS:
            raise _corrupt(f'the structure {str(structure)[:80]}')
        name, where, names, parts = structure
        if name in _BUILT_IN:
            kind, container = _BUILT_IN[name]
        else:
            kind, container = _find_class(name, where)
        builds = [self.plan(part, level + 1) for part in parts]
        names = _read_names(container, kind, names, len(builds))
        if kind is dict:
            pairs = list(zip(names, builds))
            return lambda values, blocks: {key: build(values, blocks) for key, build in pairs}
        if kind is list:
            return lambda values, blocks: [build(values, blocks) for build in builds]
        if kind is tuple:
            return lambda values, blocks: tuple([build(values, blocks) for build in builds])
        return lambda values, blocks: container.build(
            kind, names, [build(values, blocks) for build in builds]
        )

    def _plan_leaf(self, word: str) -> Build:
        kind, _, rest = word.partition(' ')
        if kind not in ('tensor', 'array'):
            self.values.append(word)
        if word in ('None', 'bool', 'int', 'float', 'str', 'bytes') or kind == 'list':
            return _next_value
        if word == 'big int':
            return lambda values, blocks: int(next(values))
        if word == 'complex':
            return lambda values, blocks: complex(*next(values))
        if kind == 'tensor':
            self.blocks.append(_tensor_type(rest))
            return _next_tensor
        if kind == 'array':
            dtype = _array_dtype(rest)
            self.blocks.append(BlockType(torch.uint8, dtype.itemsize, True))
            return lambda values, blocks: _to_array(*next(blocks), dtype)
        if kind == 'scalar' and rest in _TEXTS:
            return lambda values, blocks: _TEXTS[rest](next(values))
        if kind == 'scalar':
            dtype = _array_dtype(rest)
            return lambda values, blocks: np.frombuffer(next(values), dtype)[0]
        if kind == 'pickle':
            return self._plan_pickle(rest)
        raise _corrupt(f'the type {word!r}')

    def _plan_pickle(self, rest: str) -> Build:
        if not self._allow_pickle:
            raise SampleError(
                'a rank sent pickled objects, which can run code; expected plain data. Pass '
                'allow_pickle=True if you trust all ranks.'
            )
        types = [_tensor_type(name) for name in rest.split() if name != 'tensor']
        self.blocks.extend(types)

        def build(values: Iterator, blocks: Iterator) -> Any:
            unpickler = _Unpickler(BytesIO(next(values)))
            unpickler.tensors = [next(blocks)[0] for _ in types]
            return unpickler.load()

        return build


class _Unpickler(pickle.Unpickler):
    tensors: List[Tensor] = []

    def persistent_load(self, index: int) -> Tensor:
        return self.tensors[index]


def _next_value(values: Iterator, blocks: Iterator) -> Any:
    return next(values)


def _next_tensor(values: Iterator, blocks: Iterator) -> Tensor:
    return next(blocks)[0]


def _to_array(data: Tensor, shape: Tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    # A copy is writable and aligned.
    array = np.empty(shape, dtype)
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = data.numpy()
    return array


def _tensor_type(name: str) -> BlockType:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SampleError(
            f'a rank sent a tensor of dtype {name!r}, which torch {torch.__version__} of this '
            f'rank does not have. Install the same release of torch on all ranks.'
        )
    return BlockType(dtype, torch.empty(0, dtype=dtype).element_size(), False)


def _array_dtype(text: str) -> np.dtype:
    dtype = np.dtype(text)
    if dtype.kind not in ARRAY_KINDS:
        raise _corrupt(f'the dtype {text!r}')
    return dtype


def _read_names(container: Any, kind: Any, names: Sequence[Any], count: int) -> Tuple:
    if container in (LIST, TUPLE):
        return tuple(range(count))
    if container is DICT:
        names = tuple(_read_key(key) for key in names)
    elif container is ELEMENT:
        names = tuple((str(place), str(name)) for place, name in names)
    else:
        names = tuple(map(str, names))
        fields: Any = kind._fields if container is NAMED_TUPLE else kind.__dataclass_fields__
        expected = tuple(fields)
        if names != expected:
            raise SampleError(
                f'a rank sent a {kind.__qualname__} with the fields {list(names)}, which here has '
                f'{list(expected)}. Run the same code on all ranks.'
            )
    if len(names) != count:
        raise _corrupt(f'{count} parts for {len(names)} names')
    return names


def _read_key(key: Any) -> Any:
    if isinstance(key, str):
        return key
    kind, value = key
    if kind == 'tuple':
        return tuple(_read_key(part) for part in value)
    return int(value) if kind == 'big int' else value


def _find_class(name: str, where: str) -> Tuple[type, Any]:
    container = _NAMED.get(name)
    if container is None:
        raise _corrupt(f'the container {name!r}')
    module_name, _, qualified = where.partition(':')
    found: Any = sys.modules.get(module_name)
    for part in qualified.split('.'):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise SampleError(
            f'a rank sent a {name} {where.replace(":", ".")}, which this rank has not imported. '
            f'Import its module on all ranks, outside of functions and of __main__ blocks.'
        )
    if container_of(found) is not container:
        raise _corrupt(f'{where} as a {name}')
    return found, container


def _corrupt(what: str) -> SampleError:
    return SampleError(
        f'a rank sent {what}, which is no part of a sample. Install the same release of mmdevplug '
        f'on all ranks.'
    )
