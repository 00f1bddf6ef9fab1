"""Flatten samples that are all alike column by column, without a Python call for each sample.

A column holds one leaf of all samples: the tensors of ``sample['image']``, say, or the numbers of
``sample['reward']``.
"""

from array import array
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from mmdevplug.utils.pytree import DICT, ELEMENT, LIST, TUPLE, container_of

from .structures import LARGE_BYTES, MOST_LEVELS, PLAIN, Structure, describe_container

#: The format of a column of numbers: that of ``array.array`` and its dtype.
NUMBERS: Dict[str, Tuple[str, torch.dtype]] = {
    'float': ('d', torch.float64),
    'int': ('q', torch.int64),
    'bool': ('b', torch.bool),
}
#: Tensors up to this size are stacked at once: that takes less time than a look at each.
_SMALL_BYTES = 4 << 10
_WORDS = {**PLAIN, int: 'int'}
PLAIN_WORDS = frozenset(_WORDS.values())
_TENSORS = frozenset({Tensor, nn.Parameter})
_dtype = attrgetter('dtype')
_look = attrgetter('dtype', 'shape', 'layout', 'device', 'requires_grad')


class NotUniform(Exception):
    """Samples differ, or hold something that is not sent in columns."""


class Columns(NamedTuple):
    """The columns of samples that are all alike."""

    structure: Structure  # of each sample
    shapes: Tuple[Tuple[int, ...], ...]  # of its tensors
    #: In order: equally many numbers, strings or bytes; None for a column of None.
    values: List[Union[array, List[Any], None]]
    #: In order: the tensors stacked, or the tensors themselves.
    blocks: List[Union[Tensor, List[Tensor]]]

    @classmethod
    def of(cls, samples: Sequence[Any]) -> 'Columns':
        """Flatten samples, at least one; raise NotUniform if they are not alike."""
        columns = _Columns()
        structure = columns.describe(samples, 0)
        return cls(structure, tuple(columns.shapes), columns.values, columns.blocks)


class _Columns:
    def __init__(self) -> None:
        self.shapes: List[Tuple[int, ...]] = []
        self.values: List[Union[array, List[Any], None]] = []
        self.blocks: List[Union[Tensor, List[Tensor]]] = []

    def describe(self, column: Sequence[Any], level: int) -> Structure:
        kinds = set(map(type, column))
        if kinds <= _TENSORS:
            return self._describe_tensors(column)
        kind = kinds.pop()
        if kinds:
            raise NotUniform
        if kind in _WORDS:
            return self._describe_values(column, _WORDS[kind])
        container = container_of(kind)
        if container in (None, ELEMENT) or level >= MOST_LEVELS:
            raise NotUniform
        names = container.names(column[0])
        if container is DICT:
            keys = list(chain.from_iterable(column))
            # An equal key may be of another type, such as numpy.str_.
            if set(map(type, keys)) - {str} or keys != list(names) * len(column):
                raise NotUniform
        elif container in (LIST, TUPLE) and set(map(len, column)) != {len(names)}:
            raise NotUniform
        parts = [
            self.describe(list(map(container.part, column, repeat(name))), level + 1)
            for name in names
        ]
        if kind is list and parts and all(part in PLAIN_WORDS for part in parts):
            raise NotUniform  # lists of plain values are sent as one value
        return describe_container(kind, container, names, parts)

    def _describe_values(self, column: Sequence[Any], word: str) -> str:
        if word in NUMBERS:
            try:
                self.values.append(array(NUMBERS[word][0], column))
            except OverflowError:
                raise NotUniform from None
        else:
            self.values.append(None if word == 'None' else list(column))
        return word

    def _describe_tensors(self, column: Sequence[Tensor]) -> str:
        first = column[0]
        bytes_ = first.numel() * first.element_size()
        if bytes_ >= LARGE_BYTES or first.is_quantized or first.is_complex():
            raise NotUniform
        if bytes_ <= _SMALL_BYTES and first.device.type == 'cpu':
            self.blocks.append(_stack(column))
        else:
            self.blocks.append(_check(column))
        self.shapes.append(tuple(first.shape))
        return f'tensor {str(first.dtype)[len("torch.") :]}'


def _stack(column: Sequence[Tensor]) -> Tensor:
    """Stack small host tensors."""
    if len(set(map(_dtype, column))) > 1:
        raise NotUniform
    try:
        with torch.no_grad():
            stacked = torch.stack(column)
    except (RuntimeError, NotImplementedError):
        # Shapes, layouts or devices differ.
        raise NotUniform from None
    if stacked.layout is not torch.strided or stacked.device.type != 'cpu' or stacked.is_neg():
        raise NotUniform
    return stacked


def _check(column: Sequence[Tensor]) -> List[Tensor]:
    """Compare tensors, and return them without gradients."""
    _, _, layout, device, requires_grad = _look(column[0])
    if layout is not torch.strided or device.type == 'meta' or any(map(Tensor.is_neg, column)):
        raise NotUniform
    if len(set(map(_look, column))) > 1:
        raise NotUniform
    return [tensor.detach() for tensor in column] if requires_grad else list(column)
