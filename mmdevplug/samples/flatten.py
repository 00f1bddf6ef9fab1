"""Flatten samples into their structure, their plain values and their tensors."""

import pickle
from io import BytesIO
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor, nn

from mmdevplug.errors import SampleError
from mmdevplug.utils.pytree import container_of

from .columns import Columns, NotUniform
from .structures import (
    ARRAY_KINDS,
    MOST_LEVELS,
    PLAIN,
    Structure,
    Unencodable,
    describe_container,
    is_big,
)

_LISTED = {*PLAIN, int}


class FlatSamples:
    """Samples, flattened: column by column if they are all alike, else one by one."""

    def __init__(self, allow_pickle: bool = False) -> None:
        self.allow_pickle = allow_pickle
        self.structures: Dict[Structure, int] = {}  # numbered
        self.shapes: Dict[Tuple, int] = {}  # of the blocks of a sample, numbered
        #: For each sample the numbers of its structure and shapes; once for all in columns.
        self.kinds: List[int] = []
        self.values: List[Any] = []  # plain values in order, or columns of them
        #: Tensors and arrays in order, or columns of tensors; on any device.
        self.blocks: List[Union[Tensor, np.ndarray, List[Tensor]]] = []
        self.rows = 0  # how many samples the columns hold; 0 if samples are flattened one by one
        # The numbers of values and of blocks after each sample. One flat list, because an object
        # for each sample would trigger Python's garbage collector.
        self._ends: List[int] = [0, 0]
        self._level = 0

    def take(self, samples: Sequence[Any]) -> None:
        """Flatten samples; raise SampleError with the place and type of what cannot be sent."""
        if samples and self._take_columns(samples):
            return
        for index, sample in enumerate(samples):
            first = len(self.blocks)
            try:
                structure = self._describe(sample)
            except Unencodable as error:
                place = ''.join(reversed(error.steps))
                raise SampleError(f'sample {index}{place} is {error}') from error
            shapes = tuple([tuple(block.shape) for block in self.blocks[first:]])
            self.kinds.append(self.structures.setdefault(structure, len(self.structures)))
            self.kinds.append(self.shapes.setdefault(shapes, len(self.shapes)))
            self._ends += (len(self.values), len(self.blocks))

    def _take_columns(self, samples: Sequence[Any]) -> bool:
        try:
            structure, shapes, self.values, self.blocks = Columns.of(samples)
        except NotUniform:
            return False
        self.structures, self.shapes, self.kinds = {structure: 0}, {shapes: 0}, [0, 0]
        self.rows = len(samples)
        return True

    def select(self, begin: int, end: int) -> 'FlatSamples':
        """The samples from ``begin`` up to, but not including, ``end``."""
        chosen = FlatSamples(self.allow_pickle)
        chosen.structures, chosen.shapes = self.structures, self.shapes
        if self.rows:
            chosen.kinds, chosen.rows = self.kinds, end - begin
            chosen.values = [None if each is None else each[begin:end] for each in self.values]
            chosen.blocks = [column[begin:end] for column in self.blocks]
            return chosen
        chosen.kinds = self.kinds[2 * begin : 2 * end]
        ends = self._ends
        chosen.values = self.values[ends[2 * begin] : ends[2 * end]]
        chosen.blocks = self.blocks[ends[2 * begin + 1] : ends[2 * end + 1]]
        return chosen

    def _describe(self, value: Any) -> Structure:
        kind = type(value)
        name = PLAIN.get(kind)
        if name is not None:
            self.values.append(value)
            return name
        if kind in (Tensor, nn.Parameter):
            return self._describe_tensor(value)
        special = _SPECIAL.get(kind)
        if special is not None:
            return special(self, value)
        if isinstance(value, Tensor):
            return self._describe_tensor(value)
        if isinstance(value, np.generic):
            return self._describe_scalar(value)
        container = container_of(kind)
        if container is None:
            return self._describe_other(value)
        return self._describe_container(value, container)

    def _describe_container(self, value: Any, container: Any) -> Structure:
        kind = type(value)
        if kind is list and value and _LISTED.issuperset(map(type, value)):
            found = self._describe_plain_list(value)
            if found is not None:
                return found
        if self._level >= MOST_LEVELS:
            raise Unencodable(
                f'inside more than {MOST_LEVELS} containers; does one contain itself? Flatten it.'
            )
        self._level += 1
        names, structures = container.names(value), []
        for name, part in zip(names, container.parts(value)):
            try:
                structures.append(self._describe(part))
            except Unencodable as error:
                error.steps.append(container.step(name))
                raise
        self._level -= 1
        return describe_container(kind, container, names, structures)

    def _describe_plain_list(self, value: List[Any]) -> Optional[str]:
        """Lists of plain values are sent as one value, whatever their length."""
        kinds = set(map(type, value))
        if int in kinds and any(type(item) is int and is_big(item) for item in value):
            return None
        self.values.append(value)
        return 'list ' + ' '.join(sorted(kind.__name__ for kind in kinds))

    def _describe_int(self, value: int) -> str:
        self.values.append(str(value) if is_big(value) else value)
        return 'big int' if is_big(value) else 'int'

    def _describe_complex(self, value: complex) -> str:
        self.values.append([value.real, value.imag])
        return 'complex'

    def _describe_tensor(self, value: Tensor) -> str:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            kind = 'quantized' if value.is_quantized else 'meta' if value.is_meta else value.layout
            raise Unencodable(
                f'a tensor without plain memory ({kind}); expected a dense one. Call to_dense() '
                f'or dequantize(), or leave it out.'
            )
        if value.requires_grad:
            value = value.detach()
        if value.is_complex() or value.is_neg():
            # PyTorch conjugates and negates lazily.
            value = value.resolve_conj().resolve_neg()
        self.blocks.append(value)
        return f'tensor {str(value.dtype)[len("torch.") :]}'

    def _describe_array(self, value: np.ndarray) -> str:
        if value.dtype.kind not in ARRAY_KINDS:
            raise Unencodable(
                f'an array of dtype {value.dtype}; expected numbers, strings or times. Take it '
                f'apart into arrays of one plain dtype each.'
            )
        self.blocks.append(value)
        return f'array {value.dtype.str}'

    def _describe_scalar(self, value: np.generic) -> Structure:
        if isinstance(value, (np.str_, np.bytes_)):
            # NumPy's bytes would lose trailing zeros.
            text = isinstance(value, np.str_)
            self.values.append(str(value) if text else bytes(value))
            return 'scalar str' if text else 'scalar bytes'
        if value.dtype.kind not in ARRAY_KINDS:
            return self._describe_other(value)
        self.values.append(value.tobytes())
        return f'scalar {value.dtype.str}'

    def _describe_other(self, value: Any) -> str:
        kind = type(value)
        if not self.allow_pickle:
            raise Unencodable(
                f'a {kind.__module__}.{kind.__qualname__}, which cannot travel as plain data; '
                f'expected tensors, arrays, numbers, str, bytes, None, and dicts, lists, tuples, '
                f'dataclasses or data elements of these. Leave it out, convert it, or trust all '
                f'ranks and pass allow_pickle=True.'
            )
        tensors: List[Tensor] = []
        stream = BytesIO()
        try:
            _Pickler(stream, tensors).dump(value)
        except Exception as error:
            raise Unencodable(
                f'a {kind.__module__}.{kind.__qualname__}, which cannot be pickled: {error}'
            ) from error
        self.values.append(stream.getvalue())
        return ' '.join(['pickle', *(self._describe_tensor(tensor) for tensor in tensors)])


class _Pickler(pickle.Pickler):
    """Keeps the tensors of an object out of the pickle; they are sent as other tensors are."""

    def __init__(self, stream: BytesIO, tensors: List[Tensor]) -> None:
        super().__init__(stream, protocol=4)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> Optional[int]:
        if not isinstance(value, Tensor):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1


_SPECIAL: Dict[type, Callable[[FlatSamples, Any], Structure]] = {
    int: FlatSamples._describe_int,
    complex: FlatSamples._describe_complex,
    np.ndarray: FlatSamples._describe_array,
}
