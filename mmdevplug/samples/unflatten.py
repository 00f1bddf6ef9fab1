"""Rebuild samples from received groups: everything is checked, and no received code is run.

The classes that a structure names (named tuples, dataclasses, MMEngine's data elements) must have
been imported by this process. Objects are created without their constructors.
"""

import pickle
import sys
from collections import OrderedDict
from io import BytesIO
from typing import Any, Iterator, List, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators.move_nested import move_tensors
from mmdevplug.errors import SampleError
from mmdevplug.utils.pytree import DATACLASS, DICT, ELEMENT, LIST, NAMED_TUPLE, TUPLE, container_of

from .flatten import PLAIN, Block, Group
from .serialize import corrupt, read_array_dtype

_BUILT_IN = {
    'dict': (dict, DICT),
    'OrderedDict': (OrderedDict, DICT),
    'list': (list, LIST),
    'tuple': (tuple, TUPLE),
}
_NAMED = {each.name: each for each in (NAMED_TUPLE, DATACLASS, ELEMENT)}


def unflatten_samples(
    groups: Sequence[Group], device: torch.device, allow_pickle: bool = False
) -> List[Any]:
    """Rebuild received samples; all tensors are copied to a device in one call."""
    views = [
        tensor
        for group in groups
        for leaf in group.leaves
        if isinstance(leaf, Block)
        for tensor in leaf.tensors.unbind()
    ]
    # A view would keep the whole buffer in memory.
    moved = iter(
        [
            tensor.clone() if tensor is view else tensor
            for view, tensor in zip(views, move_tensors(views, device))
        ]
    )
    samples: List[Any] = [None] * sum(len(group.rows) for group in groups)
    for structure, rows, leaves in groups:
        columns = [
            [next(moved) for _ in rows] if isinstance(leaf, Block) else leaf for leaf in leaves
        ]
        for row, sample in zip(rows, build(structure, iter(columns), len(rows), allow_pickle)):
            samples[row] = sample
    return samples


def build(structure: Any, leaves: Iterator[List[Any]], rows: int, allow_pickle: bool) -> List[Any]:
    """Build a value for each row from the next columns of leaves."""
    if isinstance(structure, str):
        return _build_leaf(structure, next(leaves))
    name, where, names, parts = structure
    columns = [build(part, leaves, rows, allow_pickle) for part in parts]
    if name == 'pickle':
        if not allow_pickle:
            raise SampleError(
                'a rank sent pickled objects, which can run code; expected plain data. Pass '
                'allow_pickle=True if you trust all ranks.'
            )
        return [_Unpickler(data, tensors).load() for data, *tensors in zip(*columns)]
    kind, container = _BUILT_IN[name] if name in _BUILT_IN else _find_class(name, where)
    names = _read_names(container, kind, names, len(parts))
    values = zip(*columns) if columns else [()] * rows
    return [container.build(kind, names, each) for each in values]


def _build_leaf(word: str, column: List[Any]) -> List[Any]:
    kind, _, rest = word.partition(' ')
    if word in PLAIN.values() or kind in ('list', 'tensor', 'array'):
        return column
    if word == 'big int':
        return list(map(int, column))
    if word == 'complex':
        return [complex(*value) for value in column]
    if kind != 'scalar':
        raise corrupt(f'the type {word!r}')
    if rest in ('str', 'bytes'):
        return list(map(np.str_ if rest == 'str' else np.bytes_, column))
    dtype = read_array_dtype(rest)
    return [np.frombuffer(value, dtype)[0] for value in column]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        return self._tensors[index]


def _read_names(container: Any, kind: Any, names: Sequence[Any], count: int) -> Tuple:
    if container in (LIST, TUPLE):
        return tuple(range(count))
    if container is DICT:
        names = tuple(map(_read_key, names))
    elif container is not ELEMENT:
        expected = tuple(kind._fields if container is NAMED_TUPLE else kind.__dataclass_fields__)
        if names != expected:
            raise SampleError(
                f'a rank sent a {kind.__qualname__} with the fields {list(names)}, which here has '
                f'{list(expected)}. Run the same code on all ranks.'
            )
    if len(names) != count:
        raise corrupt(f'{count} parts for {len(names)} names')
    return names


def _read_key(key: Any) -> Any:
    if isinstance(key, str):
        return key
    kind, value = key
    if kind == 'tuple':
        return tuple(map(_read_key, value))
    return int(value) if kind == 'big int' else value


def _find_class(name: str, where: str) -> Tuple[type, Any]:
    container = _NAMED.get(name)
    if container is None:
        raise corrupt(f'the container {name!r}')
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
        raise corrupt(f'{where} as a {name}')
    return found, container
