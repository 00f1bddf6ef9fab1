"""Encode samples into one buffer of bytes.

A structure describes samples without their values. It is a nested tuple: a leaf is a string, such
as ``'float'``, ``'tensor float32'`` or ``'list int'``; a container is ``(kind, class, names,
structures of its parts)``. Samples of one structure and one set of shapes are a group, and each
leaf of the group is a column: no Python object is made for a sample.

A buffer is a header in msgpack and the columns of tensors, each stacked:

    length of the header (8 bytes) | header | padding | a column | padding | a column | ...
"""

import pickle
from io import BytesIO
from itertools import accumulate, chain, repeat
from math import prod
from operator import attrgetter
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import msgpack
import numpy as np
import torch
from torch import Tensor

from mmdevplug.distributed.byte_exchange import to_tensor
from mmdevplug.errors import SampleError
from mmdevplug.utils.pytree import DICT, ELEMENT, LEAVES, LIST, TUPLE, Container, container_of
from mmdevplug.utils.torch_compat import view_as_dtype

Structure = Union[str, Tuple]

VERSION = 4
#: Levels of nested containers.
MOST_LEVELS = 64
#: What msgpack takes in one piece, less what is written beside it.
MOST_ARRAY_BYTES = 2**32 - 1024
#: Columns start at multiples of this, so that any dtype can be read there.
_ALIGNMENT = 64
#: The kinds of NumPy's dtypes that are plain bytes: numbers, strings and times.
ARRAY_KINDS = 'biufcSUmM'
_TEXT = dict(unicode_errors='surrogatepass')
_attributes = attrgetter('dtype', 'shape', 'layout', 'is_meta')


class Block(NamedTuple):
    """A column of tensors of one dtype and shape."""

    dtype: torch.dtype
    shape: Tuple[int, ...]  # of each tensor
    tensors: Union[Tensor, List[Tensor]]  # stacked or not, on any device


class Group(NamedTuple):
    """Samples of one structure."""

    structure: Structure
    rows: Sequence[int]  # the indices of the samples, ascending
    leaves: List[Any]  # of each leaf a block, or a list with a value for each sample

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
        groups: Dict[str, Group] = {}
    for index, sample in enumerate(samples):
        try:
            group = _flatten([sample], [index], allow_pickle)
        except _Unencodable as error:
            place = ''.join(reversed(error.steps))
            raise SampleError(f'sample {index}{place} is {error}') from error
        # As text, because 1, 1.0 and True are equal.
        known = groups.setdefault(repr((group.structure, group.shapes)), group)
        if known is not group:
            known.rows.append(index)
            for leaf, more in zip(known.leaves, group.leaves):
                if isinstance(leaf, Block):
                    leaf, more = leaf.tensors, more.tensors
                leaf.extend(more)
    return list(groups.values())


def encode(content: Union[str, Sequence[Group]]) -> Tensor:
    """Encode samples, whose tensors are on the host, or the reason why there are none.

    Returns:
        Tensor: One-dimensional, uint8.
    """
    blocks: List[Block] = []
    if not isinstance(content, str):
        blocks = [leaf for group in content for leaf in group.leaves if isinstance(leaf, Block)]
        # The numbers of all rows follow from their count where there is one group.
        alone = len(content) == 1
        content = [[s, len(rows) if alone else list(rows), leaves] for s, rows, leaves in content]
    header = pack([VERSION, content])
    sizes = [len(block.tensors) * prod(block.shape) * itemsize(block.dtype) for block in blocks]
    places = list(accumulate([aligned(8 + len(header)), *map(aligned, sizes)]))
    # NumPy's zeros take no time until they are written.
    buffer = torch.from_numpy(np.zeros(places[-1], np.uint8))
    buffer[: 8 + len(header)] = to_tensor(len(header).to_bytes(8, 'little') + header)
    for (dtype, shape, tensors), place, size in zip(blocks, places, sizes):
        if not size:
            continue
        column = view_as_dtype(buffer[place : place + size], dtype).view(len(tensors), *shape)
        torch.stack(tensors, out=column)
    return buffer


def itemsize(dtype: torch.dtype) -> int:
    """The bytes of an element."""
    return torch.empty(0, dtype=dtype).element_size()


def aligned(size: int) -> int:
    """A size in bytes, rounded up to where a column may start."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


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
        word: Optional[str] = None
        if kind in LEAVES:
            word = kind.__name__
        elif kind is list:
            word = _only(map(_word_of_list, column))
        elif issubclass(kind, np.generic) or kind is np.ndarray:
            word = _only(map(_word_of_array, column))
        if word is not None:
            self.leaves.append(list(column))
            return word
        container = container_of(kind)
        if container is None:
            return self._describe_others(column, kind, level)
        return self._describe_containers(column, kind, container, level)

    def _describe_tensors(self, column: Sequence[Tensor]) -> str:
        first = column[0]
        if first.layout is not torch.strided or first.is_quantized or first.is_meta:
            kind = 'quantized' if first.is_quantized else 'meta' if first.is_meta else first.layout
            raise _Unencodable(
                f'a tensor without plain memory ({kind}); expected a dense one. Call to_dense() '
                f'or dequantize(), or leave it out.'
            )
        _only(map(_attributes, column))
        tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in column]
        self.leaves.append(Block(first.dtype, tuple(first.shape), tensors))
        return f'tensor {str(first.dtype).replace("torch.", "")}'

    def _describe_containers(
        self, column: Sequence[Any], kind: type, container: Container, level: int
    ) -> Structure:
        if level >= MOST_LEVELS:
            raise _Unencodable(
                f'inside more than {MOST_LEVELS} containers; does one contain itself? Flatten it.'
            )
        names = container.names(column[0])
        if container is DICT:
            keys = list(chain.from_iterable(column))
            if set(map(type, keys)) - {str}:
                _check_keys(keys)
                if len(column) > 1:  # 1, 1.0 and True are equal
                    raise _NotUniform
            elif keys != list(names) * len(column):
                raise _NotUniform
        elif container in (LIST, TUPLE):
            _only(map(len, column))
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
        described = () if container in (LIST, TUPLE) else names
        if container in (DICT, LIST, TUPLE):
            return (kind.__name__, '', described, tuple(parts))
        where = f'{kind.__module__}:{kind.__qualname__}'
        return (container.name, where, described, tuple(parts))

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


def _only(found: Any) -> Any:
    """The value that all samples have."""
    values = set(found)
    if len(values) > 1:
        raise _NotUniform
    return values.pop()


def _word_of_list(value: List[Any]) -> Optional[str]:
    """The leaf that a list of plain values is, whatever its length; None for another list."""
    kinds = set(map(type, value))
    plain = kinds and kinds <= LEAVES
    return 'list ' + ' '.join(sorted(kind.__name__ for kind in kinds)) if plain else None


def _word_of_array(value: Any) -> Optional[str]:
    """The leaf that an array or scalar of NumPy is; None for a scalar that is an object."""
    if isinstance(value, (np.str_, np.bytes_)):
        return f'scalar {value.dtype.type.__name__}'  # whatever its length
    if type(value) is np.ndarray:
        if value.dtype.kind not in ARRAY_KINDS:
            raise _Unencodable(
                f'an array of dtype {value.dtype}; expected numbers, strings or times. Take it '
                f'apart into arrays of one plain dtype each.'
            )
        if value.nbytes > MOST_ARRAY_BYTES:
            raise _Unencodable(
                f'an array of {value.nbytes:,} bytes; expected at most {MOST_ARRAY_BYTES:,}, more '
                f'than which msgpack does not take. Pass torch.from_numpy(array).'
            )
        return f'array {value.dtype.str}'
    return f'scalar {value.dtype.str}' if value.dtype.kind in ARRAY_KINDS else None


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        if type(key) is tuple:
            _check_keys(key)
        elif type(key) not in LEAVES:
            raise _Unencodable(
                f'a dict with the key {key!r} of type {type(key).__name__}; expected str, int, '
                f'float, bool, bytes, None, or tuples of these.'
            )


# plain values in msgpack, with their exact types; no received code is run ----------------------


def pack(value: object) -> bytes:
    """Write nested lists and tuples of plain values as msgpack; types of values are exact."""
    return msgpack.packb(value, default=_pack_other, strict_types=True, **_TEXT)


def unpack(data: bytes) -> Any:
    """Read what :func:`pack` returned; tuples have become lists."""
    try:
        return msgpack.unpackb(data, ext_hook=_unpack_other, **_TEXT)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise mismatch() from error


def _pack_other(value: Any) -> Any:
    for code, (kind, write, _) in enumerate(_EXTENSIONS):
        if isinstance(value, kind):
            return msgpack.ExtType(code, msgpack.packb(write(value), **_TEXT))
    return list(value)


def _unpack_other(code: int, data: bytes) -> Any:
    if code >= len(_EXTENSIONS):
        raise corrupt(f'the code {code}')
    # Without these extensions: a message that nests them would overflow the stack.
    return _EXTENSIONS[code][2](msgpack.unpackb(data, **_TEXT))


def _read_block(content: List[Any]) -> Block:
    name, shape = content
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SampleError(
            f'a rank sent a tensor of dtype {name!r}, which torch {torch.__version__} of this '
            f'rank does not have. Install the same release of torch on all ranks.'
        )
    return Block(dtype, tuple(shape), [])


def _write_array(value: Any) -> List[Any]:
    return [value.dtype.str, list(value.shape), value.tobytes()]


def _read_array(content: List[Any]) -> np.ndarray:
    text, shape, data = content
    dtype = np.dtype(text)
    if dtype.kind not in ARRAY_KINDS:
        raise corrupt(f'the dtype {text!r}')
    if len(data) != dtype.itemsize * prod(shape):
        raise mismatch()
    return np.ndarray(shape, dtype, bytearray(data))


#: Types that msgpack has not, and as what they are written and read; the place is their code.
_EXTENSIONS: Sequence[Tuple[type, Any, Any]] = (
    (Block, lambda value: [str(value.dtype)[6:], list(value.shape)], _read_block),
    # As an array a string would lose zeros at its end.
    (np.str_, str, np.str_),
    (np.bytes_, bytes, np.bytes_),
    (np.generic, _write_array, lambda content: _read_array(content)[()]),
    (np.ndarray, _write_array, _read_array),
    (int, str, int),  # of more than 64 bits
    (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
)


def corrupt(what: str) -> SampleError:
    """The error for a message with parts that are not known."""
    return SampleError(
        f'a rank sent {what}, which is no part of a sample. Install the same release of mmdevplug '
        f'on all ranks.'
    )


def mismatch() -> SampleError:
    """The error for a message whose parts contradict each other."""
    return SampleError(
        'a rank sent samples whose parts do not fit together. Install the same release of '
        'mmdevplug on all ranks.'
    )
