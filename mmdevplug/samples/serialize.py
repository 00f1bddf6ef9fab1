"""Serialize groups of samples into one buffer of bytes, and read those of other ranks.

A buffer is a header in msgpack and the tensors of each column, stacked:

    length of the header (8 bytes) | header | padding | a column | padding | a column | ...
"""

from array import array
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, Dict, Iterator, List, Sequence, Tuple, Union

import msgpack
import numpy as np
import torch
from torch import Tensor

from mmdevplug.distributed.byte_exchange import to_bytes, to_tensor
from mmdevplug.errors import SampleError
from mmdevplug.utils.torch_compat import view_as_dtype

from .flatten import ARRAY_KINDS, MOST_LEVELS, NUMBERS, Block, Group, Structure

VERSION = 3
#: Columns start at multiples of this, so that any dtype can be read there.
_ALIGNMENT = 64
_TEXT = dict(unicode_errors='surrogatepass')


def serialize(groups: Sequence[Group]) -> Tensor:
    """Serialize samples, whose tensors are on the host, into a uint8 tensor."""
    structures: Dict[Structure, int] = {}
    blocks: List[Tuple[Any, Tuple[int, ...], torch.dtype]] = []  # tensors, their shape and dtype
    described = []
    for structure, rows, leaves in groups:
        fields = []
        for leaf in leaves:
            if isinstance(leaf, Block):
                first = leaf.tensors[0]
                blocks.append((leaf.tensors, (len(rows), *first.shape), first.dtype))
                leaf = leaf.shape
            fields.append(leaf.tobytes() if isinstance(leaf, array) else leaf)
        number = structures.setdefault(structure, len(structures))
        described.append([number, list(rows) if len(groups) > 1 else len(rows), fields])
    header = msgpack.packb([VERSION, pack(list(structures)), described], **_TEXT)
    sizes = [prod(shape) * _itemsize(dtype) for _, shape, dtype in blocks]
    places = list(accumulate([_aligned(8 + len(header)), *map(_aligned, sizes)]))
    # NumPy's zeros take no time until they are written.
    buffer = torch.from_numpy(np.zeros(places[-1], np.uint8))
    buffer[: 8 + len(header)] = to_tensor(len(header).to_bytes(8, 'little') + header)
    for (tensors, shape, dtype), place, size in zip(blocks, places, sizes):
        if not size:
            continue
        column = view_as_dtype(buffer[place : place + size], dtype).view(shape)
        if isinstance(tensors, Tensor):
            column.copy_(tensors)
        else:
            torch.stack(tensors, out=column)
    return buffer


def serialize_error(message: str) -> Tensor:
    """Serialize the reason why there are no samples."""
    header = msgpack.packb([VERSION, message], **_TEXT)
    return to_tensor(len(header).to_bytes(8, 'little') + header)


def deserialize(buffer: Tensor) -> Union[str, List[Group]]:
    """Read what :func:`serialize` or :func:`serialize_error` returned on another rank.

    Blocks are views of the buffer.

    Raises:
        SampleError: If the message is not valid.
    """
    length = int.from_bytes(to_bytes(buffer[:8]), 'little')
    header = msgpack.unpackb(to_bytes(buffer[8 : 8 + length]), **_TEXT)
    if not isinstance(header, list) or len(header) not in (2, 3) or header[0] != VERSION:
        raise _mismatch()
    if len(header) == 2:
        return header[1]
    structures, groups, begin = unpack(header[1]), [], _aligned(8 + length)
    for number, rows, fields in header[2]:
        rows = range(rows) if isinstance(rows, int) else rows
        words = list(_words(structures[number], 0))
        if len(words) != len(fields):
            raise _mismatch()
        leaves = []
        for word, field in zip(words, fields):
            if word.startswith(('tensor ', 'array ')):
                leaf, size = _read_block(word, field, len(rows), buffer[begin:])
                begin += _aligned(size)
            else:
                leaf = _read_values(word, field, len(rows))
            leaves.append(leaf)
        groups.append(Group(structures[number], rows, leaves))
    found = sorted(row for group in groups for row in group.rows)
    if begin != buffer.numel() or found != list(range(len(found))):
        raise _mismatch()
    return groups


def pack(structures: object) -> bytes:
    """Structures as msgpack."""
    return msgpack.packb(structures, **_TEXT)


def unpack(data: bytes) -> Any:
    """Read what :func:`pack` returned; containers are tuples, as in structures."""
    return msgpack.unpackb(data, use_list=False, **_TEXT)


@lru_cache(maxsize=None)
def _itemsize(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _words(structure: object, level: int) -> Iterator[str]:
    """The leaves of a structure in order."""
    if isinstance(structure, str):
        yield structure
    elif not isinstance(structure, tuple) or len(structure) != 4 or level > MOST_LEVELS:
        raise corrupt(f'the structure {str(structure)[:80]}')
    else:
        for part in structure[3]:
            yield from _words(part, level + 1)


def _read_values(word: str, values: object, rows: int) -> List[Any]:
    if word in NUMBERS and isinstance(values, bytes):
        numbers = array(NUMBERS[word])
        if len(values) == rows * numbers.itemsize:
            numbers.frombytes(values)
            return list(map(bool, numbers)) if word == 'bool' else numbers.tolist()
    elif word not in NUMBERS and isinstance(values, list) and len(values) == rows:
        return values
    raise _mismatch()


def _read_block(word: str, shape: List[int], rows: int, data: Tensor) -> Tuple[Any, int]:
    """Read a column of tensors or arrays, and say how many bytes it has."""
    kind, name = word.split()
    if kind == 'tensor':
        dtype = _tensor_dtype(name)
        size = rows * prod(shape) * _itemsize(dtype)
    else:
        array_dtype = read_array_dtype(name)
        size = rows * prod(shape) * array_dtype.itemsize
    if size > data.numel():
        raise _mismatch()
    if kind == 'tensor':
        return Block(tuple(shape), view_as_dtype(data[:size], dtype).view(rows, *shape)), size
    # A copy is writable and aligned.
    arrays = np.frombuffer(to_bytes(data[:size]), array_dtype).reshape(rows, *shape)
    return [arrays[row, ...].copy() for row in range(rows)], size


def _tensor_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SampleError(
            f'a rank sent a tensor of dtype {name!r}, which torch {torch.__version__} of this '
            f'rank does not have. Install the same release of torch on all ranks.'
        )
    return dtype


def read_array_dtype(text: str) -> np.dtype:
    """Read a dtype of NumPy that is plain bytes."""
    dtype = np.dtype(text)
    if dtype.kind not in ARRAY_KINDS:
        raise corrupt(f'the dtype {text!r}')
    return dtype


def corrupt(what: str) -> SampleError:
    """The error for a message with parts that are not known."""
    return SampleError(
        f'a rank sent {what}, which is no part of a sample. Install the same release of mmdevplug '
        f'on all ranks.'
    )


def _mismatch() -> SampleError:
    return SampleError(
        'a rank sent samples whose parts do not fit together. Install the same release of '
        'mmdevplug on all ranks.'
    )
