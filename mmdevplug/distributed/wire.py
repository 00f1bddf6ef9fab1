"""Write values for other ranks, and read theirs without running anything that they choose.

A message is a pickle that refers to tensors and arrays by numbers. Those of one dtype and shape
lie behind it as the rows of a block:

    version, length of the table, length of the pickle | table, in JSON | pickle | blocks

The table has the dtype, the shape and the number of rows of each block. Each block starts at a
multiple of 64 bytes, so that any dtype can be read there.
"""

import gc
import io
import json
import pickle
import struct
import sys
from math import prod
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators.move_nested import move_tensors
from mmdevplug.errors import SampleError, first_line
from mmdevplug.utils.pytree import DATACLASS, NAMED_TUPLE, container_of, is_registered
from mmdevplug.utils.torch_compat import view_as_dtype

VERSION = 6
_HEAD = struct.Struct('<IIQ')
_ALIGNMENT = 64
#: The kinds of NumPy's dtypes that are plain bytes: numbers, strings and times.
ARRAY_KINDS = 'biufcSUmM'
CPU = torch.device('cpu')
#: Types that a pickle holds itself, looked up first: most values are of these.
_BUILT_IN = frozenset({str, bytes, bool, int, float, type(None), dict, list, tuple})


class _Parts(NamedTuple):
    """A container that is built when the pickle, which cannot change it then, has been read."""

    kind: type
    names: Tuple[object, ...]
    parts: List[object]

    def build(self, built: Callable[[object], object]) -> object:
        container: Any = container_of(self.kind)
        return container.build(self.kind, self.names, list(map(built, self.parts)))


def to_tensor(data: bytes) -> Tensor:
    """Bytes as a uint8 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def to_bytes(data: Tensor) -> bytes:
    """The bytes of a uint8 tensor."""
    return data.cpu().numpy().tobytes()


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a piece of memory, which travels as bytes."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)


def dumps(value: object, trusted: bool = False) -> Tensor:
    """Write a value as a one-dimensional uint8 tensor.

    Tensors arrive detached. With ``trusted``, objects of any class travel as pickles, which only a
    rank that trusts this one reads.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, trusted)
    pickler.dump(value)
    table = [(*key, len(rows)) for key, (_, rows) in pickler.blocks.items()]
    text = json.dumps(table).encode()
    head = _HEAD.pack(VERSION, len(text), file.tell()) + text + file.getvalue()
    places = _places(len(head), table)
    # NumPy's zeros take no time until they are written.
    message = np.zeros(places[-1], np.uint8)
    message[: len(head)] = np.frombuffer(head, np.uint8)
    for (name, shape, count), begin, (_, rows) in zip(table, places, pickler.blocks.values()):
        block = message[begin : begin + _block_bytes(name, shape, count)]
        if block.size and isinstance(rows[0], np.ndarray):
            np.stack(rows, out=block.view(name).reshape(count, *shape))
        elif block.size:
            flat = view_as_dtype(torch.from_numpy(block), rows[0].dtype)
            torch.stack(rows, out=flat.view(count, *shape))
    return torch.from_numpy(message)


def loads(message: Tensor, device: torch.device = CPU, trusted: bool = False) -> Any:
    """Read what :func:`dumps` wrote on another rank.

    Args:
        message (Tensor): Nothing that is returned shares its memory.
        device (torch.device): Where tensors arrive, all in one call. Defaults to the host.
        trusted (bool): Whether objects of any class are made, which lets the sender run code.

    Raises:
        SampleError: If the message is not valid, or names what may not be made.
    """
    # Objects are made without Python's garbage collector, which would look at all there are.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _read(message, device, trusted)
    except SampleError:
        raise
    except Exception as error:  # whatever a message that is not valid makes Python raise
        raise SampleError(
            f'a rank sent samples whose parts do not fit together ({type(error).__name__}: '
            f'{first_line(error)}). Install the same release of mmdevplug on all ranks.'
        ) from error
    finally:
        if collects:
            gc.enable()


def _read(message: Tensor, device: torch.device, trusted: bool) -> object:
    version, length, pickled = _HEAD.unpack(to_bytes(message[: _HEAD.size]))
    if version != VERSION:
        raise ValueError(f'version {version}')
    begin = _HEAD.size + length
    table = json.loads(to_bytes(message[_HEAD.size : begin]))
    counts = [count for *_, count in table]
    # Each row is named in the pickle, in some bytes of it.
    if sum(counts) > pickled or any(count < 0 for count in counts):
        raise ValueError(f'{sum(counts)} rows in {pickled} bytes')
    places = _places(begin + pickled, table)
    if places[-1] != message.numel():
        raise ValueError(f'{message.numel()} bytes')
    file = io.BytesIO(to_bytes(message[begin : begin + pickled]))
    blocks: List[Any] = []
    views: List[Tensor] = []
    for entry, place in zip(table, places):
        block = _read_block(message[place : place + _block_bytes(*entry)], *entry)
        if isinstance(block, Tensor):
            block = block.unbind()
            views += block
        blocks.append(block)
    moved = iter(move_tensors(views, device))
    for number, block in enumerate(blocks):
        if isinstance(block, tuple):
            blocks[number] = own = []
            for view, tensor in zip(block, moved):
                own.append(tensor.clone() if tensor is view else tensor)
    value = _Unpickler(file, blocks, trusted).load()
    return value if trusted else _Builder(pickled).built(value)


def _places(begin: int, table: Sequence[Sequence[Any]]) -> List[int]:
    """Where each block begins, and at last where the message ends."""
    places, end = [], begin
    for entry in table:
        places.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = places[-1] + _block_bytes(*entry)
    return [*places, -(-end // _ALIGNMENT) * _ALIGNMENT]


def _block_bytes(name: str, shape: Sequence[int], count: int) -> int:
    dtype = _read_dtype(name)
    if isinstance(dtype, np.dtype):
        return count * prod(shape) * dtype.itemsize
    return count * prod(shape) * torch.empty(0, dtype=dtype).element_size()


def _read_dtype(name: str) -> Union[torch.dtype, np.dtype]:
    """The dtype of tensors, e.g. ``'float32'``, or of arrays, e.g. ``'<f4'``."""
    if name[0] in '<>|=':
        dtype = np.dtype(name)
        if dtype.kind not in ARRAY_KINDS:
            raise ValueError(f'arrays of dtype {name}')
        return dtype
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise SampleError(
            f'a rank sent a tensor of dtype {name!r}, which torch {torch.__version__} of this '
            f'rank does not have. Install the same release of torch on all ranks.'
        )
    return found


def _read_block(data: Tensor, name: str, shape: Sequence[int], count: int) -> object:
    """A stacked tensor, or a list of arrays with memory of their own."""
    dtype = _read_dtype(name)
    if isinstance(dtype, torch.dtype):
        return view_as_dtype(data, dtype).view(count, *shape)
    rows = np.frombuffer(to_bytes(data), np.uint8).reshape(count, -1)
    return [np.ndarray(shape, dtype, bytearray(row)) for row in rows]


class _Pickler(pickle.Pickler):
    """Collects tensors and arrays, and takes containers apart unless receivers are trusted."""

    def __init__(self, file: io.BytesIO, trusted: bool) -> None:
        super().__init__(file, protocol=5)
        self._trusted = trusted
        # Without its memory: an object that is in two samples arrives as two.
        self.fast = not trusted
        #: By dtype and shape: the number of the block, and its rows.
        self.blocks: Dict[Tuple[str, Tuple[int, ...]], Tuple[int, List[Any]]] = {}

    def persistent_id(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _BUILT_IN:
            return None
        if isinstance(value, Tensor) and is_plain(value):
            name = str(value.dtype).replace('torch.', '')
            return self._add(name, tuple(value.shape), value.detach().cpu())
        if kind is np.ndarray and value.dtype.kind in ARRAY_KINDS:
            return self._add(value.dtype.str, value.shape, value)
        if isinstance(value, (np.str_, np.bytes_)):
            return 'text', value.item()  # an array would lose zeros at its end
        if isinstance(value, np.generic) and value.dtype.kind in ARRAY_KINDS:
            return ('scalar', *self._add(value.dtype.str, (), np.asarray(value)))
        if kind is complex:
            return 'complex', value.real, value.imag
        container = container_of(kind)
        if container is None or (self._trusted and not is_registered(kind)):
            return None
        names, parts = container.names(value), container.parts(value)
        return 'parts', kind.__module__, kind.__qualname__, names, parts

    def _add(self, dtype: str, shape: Tuple[int, ...], value: object) -> Tuple[int, int]:
        block, rows = self.blocks.setdefault((dtype, shape), (len(self.blocks), []))
        rows.append(value)
        return block, len(rows) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, rows: Sequence[List[object]], trusted: bool) -> None:
        super().__init__(file)
        self._rows, self._trusted = rows, trusted

    def find_class(self, module: str, name: str) -> object:
        if self._trusted:
            return super().find_class(module, name)
        raise _unknown(module, name)

    def persistent_load(self, pid: Sequence[Any]) -> Any:
        code, *rest = pid
        if isinstance(code, int):
            return self._rows[code][rest[0]]
        if code == 'scalar':
            return self._rows[rest[0]][rest[1]][()]
        if code == 'text':
            return np.str_(rest[0]) if isinstance(rest[0], str) else np.bytes_(rest[0])
        if code == 'complex':
            return complex(*rest)
        module, name, names, parts = rest
        found: Any = sys.modules.get(module)
        for part in name.split('.'):
            found = getattr(found, '__dict__', {}).get(part)  # a module's __getattr__ may import
        container = container_of(found) if isinstance(found, type) else None
        if container is None:
            raise _unknown(module, name)
        if container in (NAMED_TUPLE, DATACLASS):
            expected = found._fields if container is NAMED_TUPLE else found.__dataclass_fields__
            if names != tuple(expected):
                raise SampleError(
                    f'a rank sent a {name} with the fields {list(names)}, which here has '
                    f'{list(expected)}. Run the same code on all ranks.'
                )
        if len(dict.fromkeys(names)) != len(parts):
            raise ValueError(f'{len(parts)} parts for the names {names!r:.80}')
        made = _Parts(found, names, parts)
        return made.build(lambda part: part) if self._trusted else made


def _unknown(module: str, name: str) -> SampleError:
    return SampleError(
        f'a rank sent a {module}.{name}, which this rank does not know as a class of samples. '
        f'Import its module on all ranks, outside of functions and of __main__ blocks; '
        f'register a class that is no container with register_sample_type(), or pass '
        f'allow_pickle=True if you trust all ranks.'
    )


class _Builder:
    """Builds the containers that a message has as their parts, no more than it has bytes.

    A pickle may name one container many times, each of which would be built anew.
    """

    def __init__(self, most: int) -> None:
        self._left = most

    def built(self, value: Any) -> Any:
        kind = type(value)
        if kind not in _CONTAINERS:
            return value
        self._left -= 1
        if self._left < 0:
            raise ValueError('containers that are one')
        if kind is _Parts:
            return value.build(self.built)
        if kind is dict:
            for key, part in value.items():
                value[key] = self.built(part)
        elif kind is list:
            value[:] = map(self.built, value)
        else:
            return tuple(map(self.built, value))
        return value


_CONTAINERS = frozenset({_Parts, dict, list, tuple})
