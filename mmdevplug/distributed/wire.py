"""Write values for other ranks, and read theirs without running anything that they choose.

A message is a pickle of protocol 5. Tensors and arrays lie behind it, in its order:

    version, number of buffers, length of the pickle | sizes of the buffers | pickle | buffers

Each buffer starts at a multiple of 64 bytes, so that any dtype can be read there.
"""

import io
import pickle
import struct
import sys
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators.move_nested import move_tensors
from mmdevplug.errors import SampleError, first_line
from mmdevplug.utils.pytree import container_of
from mmdevplug.utils.torch_compat import view_as_dtype

VERSION = 5
_HEAD = struct.Struct('<IIQ')
_ALIGNMENT = 64
#: The kinds of NumPy's dtypes that are plain bytes: numbers, strings and times.
ARRAY_KINDS = 'biufcSUmM'
CPU = torch.device('cpu')
#: Stands for each buffer while its value is pickled; the bytes are copied once, to their place.
_PLACE = bytearray(1)


class Block(NamedTuple):
    """Tensors of one dtype and shape, which travel as one buffer."""

    dtype: torch.dtype
    shape: Tuple[int, ...]  # of each tensor
    tensors: Union[Tensor, List[Tensor]]  # stacked where they were received


class Kind(NamedTuple):
    """A class that a message names; a message can neither call nor change it."""

    kind: type


def to_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def to_bytes(data: Tensor) -> bytes:
    """The bytes of a uint8 tensor."""
    return data.cpu().numpy().tobytes()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a piece of memory, which travels as bytes."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)


def dumps(value: object) -> Tensor:
    """Write a value as a one-dimensional uint8 tensor.

    Tensors arrive detached. Others than tensors, arrays and what containers hold can be written,
    but only be read by a rank that trusts this one.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    sizes = list(map(_nbytes, pickler.buffers))
    head = _HEAD.pack(VERSION, len(sizes), file.tell()) + struct.pack(f'<{len(sizes)}Q', *sizes)
    begin = len(head) + file.tell()
    places = list(accumulate([_aligned(begin), *map(_aligned, sizes)]))
    # NumPy's zeros take no time until they are written.
    message = np.zeros(places[-1], np.uint8)
    message[: len(head)] = np.frombuffer(head, np.uint8)
    message[len(head) : begin] = np.frombuffer(file.getbuffer(), np.uint8)
    data = torch.from_numpy(message)
    for value, place, size in zip(pickler.buffers, places, sizes):
        if not size:
            continue
        if isinstance(value, np.ndarray):
            message[place : place + size] = np.frombuffer(value.tobytes(), np.uint8)
        else:
            column = view_as_dtype(data[place : place + size], value.dtype)
            torch.stack(value.tensors, out=column.view(len(value.tensors), *value.shape))
    return data


def loads(message: Tensor, device: torch.device = CPU, trusted: bool = False) -> Any:
    """Read what :func:`dumps` wrote on another rank.

    Args:
        message (Tensor): Blocks are views of it.
        device (torch.device): Where tensors outside of blocks arrive. Defaults to the host.
        trusted (bool): Whether objects of any class are made, which lets the sender run code.

    Raises:
        SampleError: If the message is not valid, or names what may not be made.
    """
    with refused():
        version, count, length = _HEAD.unpack(to_bytes(message[: _HEAD.size]))
        begin = _HEAD.size + 8 * count
        sizes = struct.unpack(f'<{count}Q', to_bytes(message[_HEAD.size : begin]))
        places = list(accumulate([_aligned(begin + length), *map(_aligned, sizes)]))
        if version != VERSION or places[-1] != message.numel():
            raise ValueError(f'version {version}, {message.numel()} bytes')
        file = io.BytesIO(to_bytes(message[begin : begin + length]))
        buffers = [message[place : place + size] for place, size in zip(places, sizes)]
        return _Unpickler(file, buffers, device, trusted).load()


@contextmanager
def refused() -> Iterator[None]:
    """Turn whatever a message that is not valid makes Python raise into a SampleError."""
    try:
        yield
    except SampleError:
        raise
    except Exception as error:
        raise SampleError(
            f'a rank sent samples whose parts do not fit together ({type(error).__name__}: '
            f'{first_line(error)}). Install the same release of mmdevplug on all ranks.'
        ) from error


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _nbytes(value: Union[Block, np.ndarray]) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    itemsize = torch.empty(0, dtype=value.dtype).element_size()
    return len(value.tensors) * prod(value.shape) * itemsize


class _Pickler(pickle.Pickler):
    """Collects tensors and arrays, which are written behind the pickle."""

    def __init__(self, file: io.BytesIO) -> None:
        # What the callback returns says that no buffer belongs into the pickle.
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: False)
        self.buffers: List[Union[Block, np.ndarray]] = []

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is Block:
            return _read_block, (*_dtype_and_shape(value), len(value.tensors), self._place(value))
        if kind is Tensor and is_plain(value):
            block = Block(value.dtype, tuple(value.shape), [value.detach().cpu()])
            return _read_tensor, (*_dtype_and_shape(block), self._place(block))
        if isinstance(value, (np.str_, np.bytes_)):
            # As an array it would lose zeros at its end.
            return _read_text, (value.item(),)
        if isinstance(value, np.generic) and value.dtype.kind in ARRAY_KINDS:
            return _read_scalar, (value.dtype.str, value.tobytes())
        if kind is np.ndarray and value.dtype.kind in ARRAY_KINDS:
            return _read_array, (value.dtype.str, value.shape, self._place(value))
        return NotImplemented

    def _place(self, value: Union[Block, np.ndarray]) -> pickle.PickleBuffer:
        self.buffers.append(value)
        return pickle.PickleBuffer(_PLACE)


def _dtype_and_shape(block: Block) -> Tuple[str, Tuple[int, ...]]:
    return str(block.dtype).replace('torch.', ''), tuple(block.shape)


class _Reader(NamedTuple):
    """A function that a message may call, and not change."""

    function: Callable

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, buffers: Sequence[Tensor], device: torch.device, trusted: bool
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._device, self._trusted = device, trusted

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, '_read_tensor'):
            return _Reader(lambda *args: move_tensors([_read_tensor(*args)], self._device)[0])
        if (module, name) in _READERS:
            return _READERS[module, name]
        if self._trusted:
            return super().find_class(module, name)
        found: Any = sys.modules.get(module)
        for part in name.split('.'):
            found = getattr(found, '__dict__', {}).get(part)  # a module's __getattr__ may import
        if isinstance(found, type) and container_of(found) is not None:
            return Kind(found)
        raise SampleError(
            f'a rank sent a {module}.{name}, which this rank does not know as a class of samples. '
            f'Import its module on all ranks, outside of functions and of __main__ blocks; '
            f'register a class that is no container with register_sample_type(), or pass '
            f'allow_pickle=True if you trust all ranks.'
        )


def _read_block(name: str, shape: Sequence[int], rows: int, buffer: Tensor) -> Block:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise SampleError(
            f'a rank sent a tensor of dtype {name!r}, which torch {torch.__version__} of this '
            f'rank does not have. Install the same release of torch on all ranks.'
        )
    return Block(dtype, tuple(shape), view_as_dtype(buffer, dtype).view(rows, *shape))


def _read_tensor(name: str, shape: Sequence[int], buffer: Tensor) -> Tensor:
    # A view would keep the whole message in memory.
    return _read_block(name, shape, 1, buffer).tensors[0].clone()


def _read_array(text: str, shape: Sequence[int], buffer: Tensor) -> np.ndarray:
    dtype = np.dtype(text if isinstance(text, str) else 'O')
    if dtype.kind not in ARRAY_KINDS or buffer.numel() != dtype.itemsize * prod(shape):
        raise ValueError(f'an array of dtype {text!r} and shape {shape!r}')
    return np.ndarray(shape, dtype, bytearray(to_bytes(buffer)))


def _read_scalar(text: str, data: bytes) -> np.generic:
    return _read_array(text, (), to_tensor(data))[()]


def _read_text(value: Union[str, bytes]) -> np.generic:
    return np.str_(value) if isinstance(value, str) else np.bytes_(value)


_READERS: Dict[Tuple[str, str], Any] = {
    (function.__module__, function.__name__): _Reader(function)
    for function in (_read_block, _read_array, _read_scalar, _read_text, complex)
}
