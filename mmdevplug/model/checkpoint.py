"""Loading checkpoints without running what is inside them.

MMEngine's checkpoints hold more than tensors: the message hub keeps log buffers, which are NumPy
arrays in a class of MMEngine's. PyTorch's ``weights_only`` loader refuses classes that it was not
told of, and MMEngine 0.10 tells it of none, so resuming fails on torch 2.6 and later.
"""

import os
import pickle
import re
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader
from mmengine.utils import digit_version

from mmdevplug.errors import DevPlugError

#: Older releases have no list of allowed classes, or none in which a class has another name.
_TAKES_RENAMED_CLASSES = digit_version(torch.__version__) >= digit_version('2.6.0')


def _multiarray() -> Any:
    # NumPy 2 moved it.
    return np._core.multiarray if hasattr(np, '_core') else np.core.multiarray


def allowed_classes() -> List[Any]:
    """What a checkpoint of MMEngine's own holds besides tensors and plain values."""
    dtypes = [
        type(np.dtype(name))
        for name in ('bool', 'uint8', 'int32', 'int64', 'float16', 'float32', 'float64')
    ]
    multiarray = _multiarray()
    return [
        HistoryBuffer,
        np.ndarray,
        np.dtype,
        multiarray._reconstruct,
        multiarray.scalar,
        *dict.fromkeys(dtypes),
    ]


def _method_of_history_buffer(owner: Any, name: str) -> Any:
    """Stand in for ``getattr``, by which a log buffer's statistics were pickled."""
    method = vars(HistoryBuffer).get(name)
    if owner is not HistoryBuffer or name.startswith('_') or not callable(method):
        raise pickle.UnpicklingError(f'getattr({owner!r}, {name!r}) is not allowed.')
    return method


@contextmanager
def safe_loading(filename: str) -> Iterator[None]:
    """Let ``torch.load`` accept MMEngine's own classes and nothing else.

    Args:
        filename (str): The checkpoint, for messages.

    Raises:
        DevPlugError: If the file holds other classes; the first is named.
    """
    try:
        if _TAKES_RENAMED_CLASSES:
            # Names as older and newer NumPy write them.
            multiarray = _multiarray()
            renamed = [
                (function, f'{module}.{function.__name__}')
                for function in (multiarray._reconstruct, multiarray.scalar)
                for module in ('numpy.core.multiarray', 'numpy._core.multiarray')
            ]
            renamed.append((_method_of_history_buffer, 'builtins.getattr'))
            with torch.serialization.safe_globals([*allowed_classes(), *renamed]):
                yield
        else:
            yield
    except pickle.UnpicklingError as error:
        raise DevPlugError(
            f'checkpoint {filename} holds objects that could run code when they are loaded, and '
            f'is refused: {_first_refused(error)}. Load it where you trust it and save its '
            f'state_dict alone.'
        ) from error


def _first_refused(error: pickle.UnpicklingError) -> str:
    """The class that PyTorch's unpickler names, without its advice to trust the file."""
    named = re.search(r'GLOBAL (\S+)|(\S+) is not allowed', str(error))
    return ' '.join(filter(None, named.groups())) if named else str(error).splitlines()[0]


def read_checkpoint(filename: str, map_location: Any = 'cpu') -> Dict[str, Any]:
    """Read a checkpoint.

    Args:
        filename (str): A path, or an address that MMEngine knows (``https://``, ``s3://``, ...).
        map_location: See ``torch.load``. Defaults to ``'cpu'``.

    Returns:
        dict: The checkpoint.

    Raises:
        DevPlugError: If the file holds classes other than MMEngine's own.
        FileNotFoundError: If there is no such file.
    """
    filename = os.path.expanduser(str(filename))
    with safe_loading(filename):
        if not os.path.isfile(filename):
            return CheckpointLoader.load_checkpoint(filename, map_location)
        if _TAKES_RENAMED_CLASSES:
            return torch.load(filename, map_location=map_location, weights_only=True)
        return torch.load(filename, map_location=map_location, pickle_module=_restricted_pickle())


def _restricted_pickle() -> Any:
    """A pickle module whose unpickler knows tensors and :func:`allowed_classes` alone."""
    allowed = {(cls.__module__, cls.__name__) for cls in allowed_classes()}
    allowed |= {
        (f'numpy.{core}.multiarray', name)
        for core in ('core', '_core')
        for name in ('_reconstruct', 'scalar')
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in (('builtins', 'getattr'), ('__builtin__', 'getattr')):
                return _method_of_history_buffer
            if (module, name) in allowed or _is_plain(module, name):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f'{module}.{name} is not allowed.')

    restricted = ModuleType('restricted_pickle')
    restricted.Unpickler = Unpickler
    restricted.load = lambda file, **options: Unpickler(file, **options).load()
    return restricted


_PLAIN: Tuple[Tuple[str, str], ...] = (
    ('collections', 'OrderedDict'),
    ('collections', 'defaultdict'),
    ('_codecs', 'encode'),
    ('torch', 'Size'),
    ('torch', 'device'),
    ('torch._utils', '_rebuild_tensor_v2'),
    ('torch._utils', '_rebuild_parameter'),
    ('torch._utils', '_rebuild_device_tensor_from_numpy'),
    ('torch.nn.parameter', 'Parameter'),
)


def _is_plain(module: str, name: str) -> bool:
    storage_or_dtype = module == 'torch' and (
        name.endswith('Storage') or isinstance(getattr(torch, name, None), torch.dtype)
    )
    return storage_or_dtype or (module, name) in _PLAIN
