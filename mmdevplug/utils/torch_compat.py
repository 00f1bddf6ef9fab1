"""Differences between releases of PyTorch, with the release that makes each one unnecessary."""

import re
import threading
import time
import zlib
from contextlib import AbstractContextManager
from functools import lru_cache
from importlib import import_module
from typing import Callable, Optional

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.errors import RankFailedError
from mmdevplug.utils.annotations import AnyGroup

#: Integers by size in bytes, whose memory NumPy can share.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_at_least(release: str) -> bool:
    """Whether this is a release of PyTorch, e.g. ``'2.1.0a0+git1'``, or a later one."""
    found = list(map(int, re.findall(r'\d+', torch.__version__)[:3]))
    return found >= list(map(int, release.split('.')))


# Each is true from the release on that it names.
#: Whether the operator of gradient scalers takes tensors of the CPU.
UNSCALES_ON_HOST = is_at_least('2.4.0')
#: Whether a data loader asks its data set for ``__getitems__``.
ASKS_FOR_BATCHES = is_at_least('1.13.0')
#: Whether several threads may use one connection of a ``TCPStore``.
THREADS_SHARE_STORES = is_at_least('1.11.0')
#: Whether a store's ``get`` holds the interpreter's lock for its result. Before, it creates a
#: Python object without the lock, and ends in a segmentation fault when another thread runs Python
#: meanwhile (pytorch#26475).
GETS_BYTES_SAFELY = is_at_least('1.12.0')
#: Whether checkpointed segments keep random states of any device.
CHECKPOINTS_ANY_GENERATOR = is_at_least('2.1.0')
#: Whether ``tensor.type()`` has a name for tensors of ``xla``.
NAMES_LAZY_TENSORS = is_at_least('2.0.0')
#: Whether ``torch.load`` has an argument ``weights_only``.
TAKES_WEIGHTS_ONLY = is_at_least('1.13.0')
#: Whether two tensors can exchange their data and devices, since PyTorch 2.3.
SWAPS_TENSORS = hasattr(torch._C, '_swap_tensor_impl')
#: Whether ``weights_only`` takes classes under other names.
ALLOWS_RENAMED_CLASSES = is_at_least('2.6.0')

#: Since PyTorch 1.13 a mode sees each operator, in the backward pass, too.
try:
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

    DISPATCH_MODES = hasattr(DispatchMode, '__enter__')
except ImportError:
    DispatchMode, DISPATCH_MODES = object, False  # type: ignore[assignment,misc]


class LockedStore:
    """A store for several threads, as PyTorch's own is where ``THREADS_SHARE_STORES``.

    Without a lock the answers of PyTorch 1.10 reach the wrong thread, which hangs or reads bytes
    of a value as its length (``std::bad_alloc``).
    """

    def __init__(self, store: 'torch_dist.Store') -> None:
        self._store, self._lock = store, threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            return self._store.add(key, amount)


#: Bytes in one number of a store, whose ``add`` returns 64 bits with a sign.
_CHUNK = 7
#: How long a text may take that its writer has announced.
_TEXT_SECONDS = 60


def set_text(store: 'torch_dist.Store', key: str, text: str) -> None:
    """Set a key of a store to a text, for :func:`get_text`."""
    if GETS_BYTES_SAFELY:
        store.set(key, text)
        return
    # As numbers, which `add` reads safely; in turn in two places, so that a reader of the last
    # text does not see half of the next.
    data = text.encode()
    before = store.add(f'{key}/place', 0)
    place = f'{key}/{1 - before}'
    for start in range(0, len(data), _CHUNK):
        number = int.from_bytes(data[start : start + _CHUNK].ljust(_CHUNK, b'\0'), 'big')
        store.set(f'{place}/{start}', str(number))
    store.set(f'{place}/size', str(len(data) + 1 << 32 | zlib.crc32(data)))
    # `set` returns before the store has the value, `add` after it has this and all before.
    store.add(f'{key}/place', 1 - 2 * before)


def read_counter(store: 'torch_dist.Store', key: str) -> int:
    """Read a number that ``add`` has written under a key, without writing where that works."""
    return int(store.get(key)) if GETS_BYTES_SAFELY else store.add(key, 0)


def get_text(store: 'torch_dist.Store', key: str) -> str:
    """Read what :func:`set_text` wrote under a key, or is about to write."""
    if GETS_BYTES_SAFELY:
        return store.get(key).decode()
    deadline = time.monotonic() + _TEXT_SECONDS
    while True:
        place = f'{key}/{store.add(f"{key}/place", 0)}'
        size, checksum = divmod(store.add(f'{place}/size', 0), 1 << 32)
        starts = range(0, size - 1, _CHUNK)
        chunks = [store.add(f'{place}/{start}', 0).to_bytes(_CHUNK, 'big') for start in starts]
        data = b''.join(chunks)[: max(0, size - 1)]
        # Else there is none yet, or the writer was faster by two texts.
        if size and zlib.crc32(data) == checksum:
            return data.decode()
        if time.monotonic() > deadline:
            raise RankFailedError(
                f'a rank announced a message ({key!r}) and sent none within {_TEXT_SECONDS} s; '
                f'expected it at once. It died meanwhile: see the logs of the other ranks, and '
                f'start the job again.'
            )
        time.sleep(0.01)


def import_version_module() -> None:
    """Import what PyTorch 1.10 takes for imported, in TensorBoard's writer and its test samples.

    It reads ``distutils.version``, which setuptools has not imported since release 59.6.
    """
    if not is_at_least('1.11.0'):
        import_module('distutils.version')


def get_global_rank(group: AnyGroup, rank: int) -> int:
    """The rank in the whole job of a rank of a group: a public function from PyTorch 1.13 on."""
    if group is None or group is torch_dist.group.WORLD:
        return rank
    if is_at_least('1.13.0'):
        return torch_dist.get_global_rank(group, rank)
    return torch_dist.distributed_c10d._get_global_rank(group, rank)


def decomposition_of(operator: str) -> Optional[Callable]:
    """PyTorch's composition of an ATen operator from plainer ones; None before PyTorch 2.0."""
    if not is_at_least('2.0.0'):
        return None
    table = import_module('torch._decomp').decomposition_table
    return table[getattr(torch.ops.aten, operator).default]


def plain_tensor_functions() -> AbstractContextManager:
    """Call functions of tensors without ``__torch_function__`` of subclasses."""
    before_2_0 = 'DisableTorchFunction'
    return getattr(torch._C, f'{before_2_0}Subclass', getattr(torch._C, before_2_0))()


def default_autocast_dtype(device_type: str) -> torch.dtype:
    """The dtype that autocast casts to by default: from PyTorch 2.4 on, that of the one around."""
    if hasattr(torch, 'get_autocast_dtype'):
        return torch.get_autocast_dtype(device_type)
    return torch.bfloat16 if device_type in ('cpu', 'xla') else torch.float16


def is_functional(tensor: Tensor) -> bool:
    """Whether a tensor is one of PyTorch's lazy device, which copies to no memory that exists.

    PyTorch before 2.0 cannot tell.
    """
    ask = getattr(torch, '_is_functional_tensor', None)
    return ask is not None and ask(tensor)


@lru_cache(maxsize=None)  # once a process: each call would lengthen PyTorch's list
def keep_from_tracing(*modules: str) -> None:
    """Exclude modules from what ``torch.compile`` traces; PyTorch 2.2 renamed the list of them."""
    if not hasattr(torch, 'compile'):
        return  # MMEngine's own error says what is needed
    dynamo = import_module('torch._dynamo')
    rules = getattr(dynamo, 'trace_rules', None) or dynamo.skipfiles
    for module in modules:
        rules.add(module)


def view_as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View the memory of a flat, contiguous tensor as another dtype, also of another size.

    ``Tensor.view(dtype)`` can do it from PyTorch 1.11 on; in 1.10 only host tensors are possible.
    """
    if is_at_least('1.11'):
        return tensor.view(dtype)
    if not tensor.numel():
        return torch.empty(0, dtype=dtype)
    size = tensor.element_size()
    plain = tensor.detach().view(_INTEGERS[size]) if size in _INTEGERS else tensor.detach()
    return torch.frombuffer(plain.numpy(), dtype=dtype)
