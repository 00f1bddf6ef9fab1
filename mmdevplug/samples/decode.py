"""Decode the samples of other ranks: everything is checked, and no received code is run.

The classes that a structure names (named tuples, dataclasses, MMEngine's data elements) must have
been imported by this process. Objects are created without their constructors.
"""

import pickle
import sys
from collections import OrderedDict
from io import BytesIO
from math import prod
from typing import Any, Iterator, List, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators.move_nested import move_tensors
from mmdevplug.distributed.byte_exchange import to_bytes
from mmdevplug.errors import SampleError
from mmdevplug.utils.pytree import (
    CONTAINERS,
    DATACLASS,
    LEAVES,
    LIST,
    NAMED_TUPLE,
    TUPLE,
    container_of,
)
from mmdevplug.utils.torch_compat import view_as_dtype

from .encode import (
    MOST_LEVELS,
    VERSION,
    Block,
    Group,
    aligned,
    corrupt,
    itemsize,
    mismatch,
    unpack,
)

_BUILT_IN = {kind.__name__: kind for kind in (dict, OrderedDict, list, tuple)}
#: The first words of leaves, and the types of their values where these are checked.
_WORDS = {
    **{kind.__name__: object for kind in LEAVES},
    'list': list,
    'tensor': Tensor,
    'array': np.ndarray,
    'scalar': np.generic,
}


def decode(buffer: Tensor) -> Union[str, List[Group]]:
    """Read what :func:`mmdevplug.samples.encode.encode` returned on another rank.

    Blocks are views of the buffer.

    Raises:
        SampleError: If the message is not valid.
    """
    length = int.from_bytes(to_bytes(buffer[:8]), 'little')
    header = unpack(to_bytes(buffer[8 : 8 + length]))
    if not isinstance(header, list) or header[:1] != [VERSION]:
        raise mismatch()
    (content,) = header[1:]
    if isinstance(content, str):
        return content
    groups, begin = [], aligned(8 + length)
    for structure, rows, leaves in content:
        rows = range(rows) if isinstance(rows, int) else rows
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Block):
                size = len(rows) * prod(leaf.shape) * itemsize(leaf.dtype)
                if size > buffer.numel() - begin:
                    raise mismatch()
                column = view_as_dtype(buffer[begin : begin + size], leaf.dtype)
                leaves[index] = leaf._replace(tensors=column.view(len(rows), *leaf.shape))
                begin += aligned(size)
            elif not isinstance(leaf, list) or len(leaf) != len(rows):
                raise mismatch()
        groups.append(Group(as_tuples(structure), rows, leaves))
    found = sorted(row for group in groups for row in group.rows)
    if begin != buffer.numel() or found != list(range(len(found))):
        raise mismatch()
    return groups


def as_tuples(nested: Any) -> Any:
    """Nested lists as tuples."""
    return tuple(map(as_tuples, nested)) if isinstance(nested, list) else nested


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
        for row, sample in zip(rows, build(structure, columns, len(rows), allow_pickle)):
            samples[row] = sample
    return samples


def build(structure: Any, columns: List[Any], rows: int, allow_pickle: bool = False) -> List[Any]:
    """Build a value for each row from the columns of all leaves."""
    leaves = iter(columns)
    built = _build(structure, leaves, rows, allow_pickle, 0)
    if next(leaves, None) is not None:
        raise mismatch()
    return built


def _build(
    structure: Any, leaves: Iterator[List[Any]], rows: int, allow_pickle: bool, level: int
) -> List[Any]:
    if isinstance(structure, str):
        return _build_leaf(structure, next(leaves, None))
    if not isinstance(structure, tuple) or len(structure) != 4 or level > MOST_LEVELS:
        raise corrupt(f'the structure {str(structure)[:80]}')
    name, where, names, parts = structure
    columns = [_build(part, leaves, rows, allow_pickle, level + 1) for part in parts]
    if name == 'pickle':
        if not allow_pickle:
            raise SampleError(
                'a rank sent pickled objects, which can run code; expected plain data. Pass '
                'allow_pickle=True if you trust all ranks.'
            )
        return [_Unpickler(data, tensors).load() for data, *tensors in zip(*columns)]
    kind, container = _find_class(name, where)
    names = _read_names(container, kind, names, len(parts))
    values = zip(*columns) if columns else [()] * rows
    return [container.build(kind, names, each) for each in values]


def _build_leaf(word: str, column: Any) -> List[Any]:
    kind = _WORDS.get(word.partition(' ')[0])
    if kind is None:
        raise corrupt(f'the type {word!r}')
    if column is None or not all(issubclass(each, kind) for each in set(map(type, column))):
        raise mismatch()
    return column


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, index: int) -> Tensor:
        return self._tensors[index]


def _read_names(container: Any, kind: Any, names: Sequence[Any], count: int) -> Tuple:
    if container in (LIST, TUPLE):
        return tuple(range(count))
    if container in (NAMED_TUPLE, DATACLASS):
        expected = tuple(kind._fields if container is NAMED_TUPLE else kind.__dataclass_fields__)
        if names != expected:
            raise SampleError(
                f'a rank sent a {kind.__qualname__} with the fields {list(names)}, which here has '
                f'{list(expected)}. Run the same code on all ranks.'
            )
    if len(names) != count:
        raise corrupt(f'{count} parts for {len(names)} names')
    return names


def _find_class(name: str, where: str) -> Tuple[type, Any]:
    container = CONTAINERS.get(name)
    if container is None:
        raise corrupt(f'the container {name!r}')
    if name in _BUILT_IN:
        return _BUILT_IN[name], container
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
