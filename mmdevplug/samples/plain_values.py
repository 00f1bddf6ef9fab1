"""Write plain values as msgpack with their exact types, and read them; no received code is run."""

from math import prod
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple, Union

import msgpack
import numpy as np
import torch
from torch import Tensor

from mmdevplug.errors import SampleError

#: The kinds of NumPy's dtypes that are plain bytes: numbers, strings and times.
ARRAY_KINDS = 'biufcSUmM'
_TEXT = dict(unicode_errors='surrogatepass')


class Block(NamedTuple):
    """A column of tensors of one dtype and shape."""

    dtype: torch.dtype
    shape: Tuple[int, ...]  # of each tensor
    tensors: Union[Tensor, List[Tensor]]  # stacked or not, on any device


def pack(value: object) -> bytes:
    """Write nested lists and tuples of plain values as msgpack; types of values are exact."""
    return msgpack.packb(value, default=_pack_other, strict_types=True, **_TEXT)


def unpack(data: bytes) -> Any:
    """Read what :func:`pack` returned; tuples have become lists."""
    try:
        return msgpack.unpackb(data, ext_hook=_unpack_other, **_TEXT)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise mismatch() from error


def as_tuples(nested: Any) -> Any:
    """Nested lists as tuples."""
    return tuple(map(as_tuples, nested)) if isinstance(nested, list) else nested


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
_EXTENSIONS: Sequence[Tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = (
    (
        Block,
        lambda value: [str(value.dtype)[6:], list(value.shape)],
        _read_block,
    ),
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
