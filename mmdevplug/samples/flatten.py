"""Flatten samples into columns.

A structure describes samples without their values. It is a nested tuple: a leaf is a string, such
as ``'float'``, ``'tensor float32'`` or ``'list int'``; a container is ``(kind, class, names,
structures of its parts)``. Samples of one structure and one set of shapes are a group, and each
leaf of the group is a column: no Python object is made for a sample.
"""

import pickle
from array import array
from bisect import bisect_left
from collections import OrderedDict
from io import BytesIO
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from mmdevplug.distributed.byte_exchange import to_tensor
from mmdevplug.errors import SampleError
from mmdevplug.utils.pytree import DICT, ELEMENT, LIST, TUPLE, Container, container_of

Structure = Union[str, Tuple]

#: Levels of nested containers.
MOST_LEVELS = 64
#: The kinds of NumPy's dtypes that are plain bytes: numbers, strings and times.
ARRAY_KINDS = 'biufcSUmM'
#: Columns of these are sent as the bytes of an ``array.array`` of this format.
NUMBERS = {'float': 'd', 'int': 'q', 'bool': 'b'}
#: Types whose values are sent as they are. An ``int`` may have too many bits.
PLAIN = {type(None): 'None', bool: 'bool', float: 'float', str: 'str', bytes: 'bytes', int: 'int'}
#: Tensors up to this size are stacked at once: that takes less time than to compare them.
_SMALL_BYTES = 4 << 10
_BUILT_IN = {dict: 'dict', OrderedDict: 'OrderedDict', list: 'list', tuple: 'tuple'}
_attributes = attrgetter('dtype', 'shape', 'layout', 'is_meta')


class Block(NamedTuple):
    """A column of tensors of one dtype and shape."""

    shape: Tuple[int, ...]  # of each tensor
    tensors: Union[Tensor, List[Tensor]]  # stacked or not, on any device


class Group(NamedTuple):
    """Samples of one structure."""

    structure: Structure
    rows: Sequence[int]  # the indices of the samples, ascending
    leaves: List[Any]  # of each leaf a block, or an array or list with a value for each sample

    @property
    def shapes(self) -> Tuple:
        """The shapes of the tensors of a sample."""
        return tuple([leaf.shape for leaf in self.leaves if isinstance(leaf, Block)])


class _NotUniform(Exception):
    """Samples differ in structure or shape."""


class _Unencodable(Exception):
    """A value cannot be sent; carries the steps to it, the innermost first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.steps: List[str] = []


def flatten_samples(samples: Sequence[Any], allow_pickle: bool = False) -> List[Group]:
    """Flatten samples into a group for each structure and set of shapes.

    Raises:
        SampleError: With the place and the type of what cannot be sent.
    """
    if not samples:
        return []
    try:
        return [_flatten(samples, range(len(samples)), allow_pickle)]
    except (_NotUniform, _Unencodable):
        groups: Dict[Any, Group] = {}
    for index, sample in enumerate(samples):
        try:
            group = _flatten([sample], [index], allow_pickle)
        except _Unencodable as error:
            place = ''.join(reversed(error.steps))
            raise SampleError(f'sample {index}{place} is {error}') from error
        known = groups.setdefault((group.structure, group.shapes), group)
        if known is not group:
            known.rows.append(index)
            for leaf, more in zip(known.leaves, group.leaves):
                if isinstance(leaf, Block):
                    leaf, more = leaf.tensors, more.tensors
                leaf.extend(more)
    return list(groups.values())


def select(groups: Sequence[Group], begin: int, end: int) -> List[Group]:
    """Select the samples from ``begin`` up to, but not including, ``end``."""
    chosen = []
    for structure, rows, leaves in groups:
        part = slice(bisect_left(rows, begin), bisect_left(rows, end))
        if part.start < part.stop:
            cut = [
                Block(leaf.shape, leaf.tensors[part]) if isinstance(leaf, Block) else leaf[part]
                for leaf in leaves
            ]
            chosen.append(Group(structure, [row - begin for row in rows[part]], cut))
    return chosen


def _flatten(samples: Sequence[Any], rows: Sequence[int], allow_pickle: bool) -> Group:
    columns = _Columns(allow_pickle)
    return Group(columns.describe(samples, 0), rows, columns.leaves)


class _Columns:
    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self.leaves: List[Any] = []

    def describe(self, column: Sequence[Any], level: int) -> Structure:
        """Describe a value of each sample, and add its leaves."""
        kinds = set(map(type, column))
        if all(issubclass(kind, Tensor) for kind in kinds):
            return self._describe_tensors(column)
        kind = kinds.pop()
        if kinds:
            raise _NotUniform
        if kind in PLAIN:
            return self._describe_plain(column, PLAIN[kind])
        if kind is complex:
            self.leaves.append([[value.real, value.imag] for value in column])
            return kind.__name__
        if kind is np.ndarray:
            return self._describe_arrays(column)
        if issubclass(kind, np.generic) and column[0].dtype.kind in ARRAY_KINDS:
            return self._describe_scalars(column, kind)
        container = container_of(kind)
        if container is None:
            return self._describe_others(column, kind, level)
        word = _only(map(_word_of_list, column)) if kind is list else None
        if word is not None:
            self.leaves.append(list(column))
            return word
        return self._describe_containers(column, kind, container, level)

    def _describe_plain(self, column: Sequence[Any], word: str) -> str:
        if word not in NUMBERS:
            self.leaves.append(list(column))
            return word
        try:
            self.leaves.append(array(NUMBERS[word], column))
        except OverflowError:
            if not all(map(_is_big, column)):
                raise _NotUniform from None
            self.leaves.append(list(map(str, column)))
            return 'big int'
        return word

    def _describe_tensors(self, column: Sequence[Tensor]) -> str:
        first = column[0]
        if first.layout is not torch.strided or first.is_quantized or first.is_meta:
            kind = 'quantized' if first.is_quantized else 'meta' if first.is_meta else first.layout
            raise _Unencodable(
                f'a tensor without plain memory ({kind}); expected a dense one. Call to_dense() '
                f'or dequantize(), or leave it out.'
            )
        tensors: Union[Tensor, List[Tensor]]
        small = first.device.type == 'cpu' and first.numel() * first.element_size() <= _SMALL_BYTES
        if small and len(column) > 1:
            tensors = _stack(column)
        else:
            _only(map(_attributes, column))
            tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in column]
        self.leaves.append(Block(tuple(first.shape), tensors))
        return f'tensor {str(first.dtype)[len("torch.") :]}'

    def _describe_arrays(self, column: Sequence[np.ndarray]) -> str:
        dtype, shape = _only([(value.dtype, value.shape) for value in column])
        if dtype.kind not in ARRAY_KINDS:
            raise _Unencodable(
                f'an array of dtype {dtype}; expected numbers, strings or times. Take it apart '
                f'into arrays of one plain dtype each.'
            )
        self.leaves.append(Block(shape, [to_tensor(value.tobytes()) for value in column]))
        return f'array {dtype.str}'

    def _describe_scalars(self, column: Sequence[np.generic], kind: type) -> str:
        if issubclass(kind, (np.str_, np.bytes_)):
            # NumPy's bytes would lose trailing zeros.
            plain = str if issubclass(kind, np.str_) else bytes
            self.leaves.append(list(map(plain, column)))
            return f'scalar {plain.__name__}'
        self.leaves.append([value.tobytes() for value in column])
        return f'scalar {_only([value.dtype.str for value in column])}'

    def _describe_containers(
        self, column: Sequence[Any], kind: type, container: Container, level: int
    ) -> Structure:
        if level >= MOST_LEVELS:
            raise _Unencodable(
                f'inside more than {MOST_LEVELS} containers; does one contain itself? Flatten it.'
            )
        names = container.names(column[0])
        described = names
        if container is DICT:
            keys = list(chain.from_iterable(column))
            if set(map(type, keys)) - {str}:
                described = _only([tuple(map(_describe_key, each)) for each in column])
            elif keys != list(names) * len(column):
                raise _NotUniform
        elif container in (LIST, TUPLE):
            _only(map(len, column))
            described = ()
        elif container is ELEMENT:
            _only(map(container.names, column))
        parts = []
        for name in names:
            try:
                part = list(map(container.part, column, repeat(name)))
                parts.append(self.describe(part, level + 1))
            except _Unencodable as error:
                error.steps.append(container.step(name))
                raise
        builtin = _BUILT_IN.get(kind)
        where = '' if builtin else f'{kind.__module__}:{kind.__qualname__}'
        return (builtin or container.name, where, described, tuple(parts))

    def _describe_others(self, column: Sequence[Any], kind: type, level: int) -> Structure:
        name = f'{kind.__module__}.{kind.__qualname__}'
        if not self._allow_pickle:
            raise _Unencodable(
                f'a {name}, which cannot travel as plain data; expected tensors, arrays, numbers, '
                f'str, bytes, None, and dicts, lists, tuples, dataclasses or data elements of '
                f'these. Leave it out, convert it, or trust all ranks and pass allow_pickle=True.'
            )
        pickles, tensors = [], []
        for value in column:
            stream = BytesIO()
            pickler = _Pickler(stream)
            try:
                pickler.dump(value)
            except Exception as error:
                raise _Unencodable(f'a {name}, which cannot be pickled: {error}') from error
            pickles.append(stream.getvalue())
            tensors.append(pickler.tensors)
        _only(map(len, tensors))
        parts = [self.describe(part, level + 1) for part in (pickles, *zip(*tensors))]
        return ('pickle', '', (), tuple(parts))


class _Pickler(pickle.Pickler):
    """Keeps the tensors of an object out of the pickle; they are sent as other tensors are."""

    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, protocol=4)
        self.tensors: List[Tensor] = []

    def persistent_id(self, value: object) -> Optional[int]:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


def _stack(column: Sequence[Tensor]) -> Tensor:
    """Stack small host tensors."""
    _only([tensor.dtype for tensor in column])
    try:
        with torch.no_grad():
            return torch.stack(list(column))
    except (RuntimeError, NotImplementedError):
        # Shapes, layouts or devices differ.
        raise _NotUniform from None


def _only(found: Any) -> Any:
    """The value that all samples have."""
    values = set(found)
    if len(values) > 1:
        raise _NotUniform
    return values.pop()


def _word_of_list(value: List[Any]) -> Optional[str]:
    """The leaf that a list of plain values is, whatever its length; None for another list."""
    kinds = set(map(type, value))
    if not kinds or not kinds <= set(PLAIN):
        return None
    try:
        array('q', [item for item in value if type(item) is int])
    except OverflowError:
        return None
    return 'list ' + ' '.join(sorted(kind.__name__ for kind in kinds))


def _describe_key(key: Any) -> Any:
    kind = type(key)
    if kind is str:
        return key
    # With the type, because 1, 1.0 and True are equal.
    if kind is int and _is_big(key):
        return ('big int', str(key))
    if kind in PLAIN:
        return (PLAIN[kind], key)
    if kind is tuple:
        return ('tuple', tuple(_describe_key(part) for part in key))
    raise _Unencodable(
        f'a dict with the key {key!r} of type {kind.__name__}; expected str, int, float, bool, '
        f'bytes, None, or tuples of these.'
    )


def _is_big(value: int) -> bool:
    """Whether an ``int`` needs more than 64 bits."""
    return not -(2**63) <= value < 2**63
