"""Load checkpoints without running code from them.

MMEngine's checkpoints hold more than tensors, such as log buffers: NumPy arrays in a class of
MMEngine's. PyTorch's ``weights_only`` loader refuses classes that are not allowed explicitly, and
MMEngine 0.10 allows none, so resuming fails with PyTorch 2.6 and later.
"""

import io
import os
import pickle
import re
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Callable, Iterator, List, Optional, Sequence

import numpy as np
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.utils import get_object_from_string

from mmdevplug.errors import CheckpointError, DevPlugError, first_line
from mmdevplug.utils.file_kinds import check_archive, describe_no_checkpoint
from mmdevplug.utils.patching import OWN, patch_symbol
from mmdevplug.utils.torch_compat import ALLOWS_RENAMED_CLASSES, TAKES_WEIGHTS_ONLY

# NumPy 2 moved it; 1.26 has an empty package in the new place.
_numpy: Any = np
_core: object = getattr(np, '_core', None)
_multiarray: Any = _core.multiarray if hasattr(_core, 'multiarray') else _numpy.core.multiarray

#: Containers and types of Python, whose creation runs no code.
_BUILTINS = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice),
    *(str, tuple),
)
_NUMPY_DTYPES = '?bhilqBHILQefdFDSUmM'  # NumPy's codes of bool, numbers, texts and times


def _one_cycle(*_: object) -> None:
    """Stand in for the class OneCycleParamScheduler, which no checkpoint may create."""
    raise pickle.UnpicklingError(f'{_ONE_CYCLE} is not allowed to be called.')


#: Checkpoints name the class because of its two annealing functions.
_ONE_CYCLE = f'{OneCycleParamScheduler.__module__}.{OneCycleParamScheduler.__name__}'
_ANNEALING = ('_annealing_cos', '_annealing_linear')


def _method(owner: object, name: str) -> object:
    """Stand in for ``getattr`` in pickled methods: of log buffers, and OneCycleLR's annealing."""
    method = None
    if owner is _one_cycle and name in _ANNEALING:
        method = getattr(OneCycleParamScheduler, name)
    elif owner is HistoryBuffer and not name.startswith('_'):
        method = vars(HistoryBuffer).get(name)
    if not callable(method):
        raise pickle.UnpicklingError(f'getattr({owner!r}, {name!r}) is not allowed.')
    return method


def _rebuild_on_host(data: np.ndarray, dtype: torch.dtype, _: str, requires_grad: bool) -> object:
    """Rebuild a tensor of a T20, which torch_gcu's own function sends to the current card."""
    return torch.from_numpy(data).to(dtype).requires_grad_(requires_grad)


#: Names in checkpoint files, and the objects that are loaded instead.
_REPLACED = {
    'builtins.getattr': _method,
    _ONE_CYCLE: _one_cycle,
    'torch_gcu.core.pytorch_override._rebuild_device_tensor_from_numpy_gcu': _rebuild_on_host,
}

#: What MMEngine's checkpoints hold besides tensors and plain values; NumPy's functions also by the
#: names that older and newer releases of it write.
_ALLOWED = [
    *_BUILTINS,
    *(Counter, OrderedDict, defaultdict, deque, ConfigDict, HistoryBuffer, np.ndarray, np.dtype),
    *(_multiarray._reconstruct, _multiarray.scalar),
    *dict.fromkeys(type(np.dtype(code)) for code in _NUMPY_DTYPES),
    *(
        (function, f'{module}.multiarray.{function.__name__}')
        for function in (_multiarray._reconstruct, _multiarray.scalar)
        for module in ('numpy.core', 'numpy._core')
    ),
    *zip(_REPLACED.values(), _REPLACED),
]
#: Classes that users trust.
_trusted: List[object] = []


def trust_classes(names: Sequence[str]) -> None:
    """Let checkpoints hold objects of these classes, too, e.g. ``['my_package.BoxCoder']``.

    Those of an earlier call are not trusted any more: each runner calls it. Loading a file may
    then create such objects and call their ``__setstate__``.
    """
    _trusted.clear()
    if not isinstance(names, (list, tuple, set)):
        raise CheckpointError(
            f'checkpoint_classes={names!r}: expected a list of dotted names, e.g. '
            f"checkpoint_classes=['my_package.MyClass']."
        )
    for name in names:
        found = get_object_from_string(name) if isinstance(name, str) else None
        if not isinstance(found, type):
            raise CheckpointError(
                f'checkpoint_classes={list(names)!r}: {name!r} is no class that can be imported; '
                f"expected dotted names, e.g. checkpoint_classes=['my_package.MyClass']."
            )
        if found not in _trusted:
            _trusted.append(found)


#: The checkpoint that was read last, to name it when it does not fit.
_last_read: ContextVar[str] = ContextVar('last_read', default='given')
#: Guards the classes that PyTorch allows, which it has once in a process.
_process_wide = threading.RLock()


@contextmanager
def safe_loading(filename: str, forced: bool = True) -> Iterator[None]:
    """Let ``torch.load`` accept MMEngine's classes and no others in this context, for its thread.

    Others raise CheckpointError, which names the first. Calls with ``weights_only=False`` or a
    ``pickle_module`` are made safe, too, if ``forced``, and whatever cannot be read raises
    CheckpointError: not where a user's code loads.
    """
    opened: List[str] = []
    failures: List[Exception] = []
    thread: Optional[int] = threading.get_ident()

    @wraps(torch.load)
    def load(f: object, *args: object, **kwargs: object) -> object:
        if threading.get_ident() != thread:
            return patch.original(f, *args, **kwargs)
        if isinstance(f, (str, os.PathLike)):
            opened.append(str(f))
            if forced and os.path.isfile(f):
                _check(f)
        try:
            # An outer context that forces safe loading also holds inside this one.
            return _load_safely(patch.original, forced, f, *args, **kwargs)
        except Exception as error:
            failures.append(error)
            raise

    patch = patch_symbol(torch, 'load', load, OWN)
    try:
        yield
        if forced:
            _last_read.set(filename)
    except Exception as error:
        path = opened[-1] if opened else filename
        refused = _first_refused(error) if isinstance(error, pickle.UnpicklingError) else None
        if refused is not None and error in failures:
            raise CheckpointError(
                f'checkpoint {path} holds objects that could run code '
                f'when they are loaded, and is refused: {refused}. If you trust the file and this '
                f"is a class, set checkpoint_classes=['{refused.split()[0]}'] in the config; or "
                f'load it where you trust it and save its state_dict alone.'
            ) from error
        # OSError: of a path, or of the network. KeyError: of a name such as torchvision://...
        if not forced or not (error in failures or isinstance(error, (OSError, KeyError))):
            raise
        # Errors about missing devices are explained elsewhere.
        others = ('out of memory', 'on a CUDA device')
        if isinstance(error, DevPlugError) or any(text in str(error) for text in others):
            raise
        raise CheckpointError(_describe_unreadable(path, error)) from error
    finally:
        patch.restore()
        thread = None  # whoever has kept this function gets PyTorch's


def _check(path: Any) -> None:
    try:
        check_archive(path)
    except ValueError as error:
        raise CheckpointError(
            f'checkpoint {path} is damaged: {error}. Take the one before it, or copy it again.'
        ) from error


def refused_names(file: Any) -> List[str]:
    """Return the names of classes and functions in a written file that are not loaded."""
    if not ALLOWS_RENAMED_CLASSES:
        return []  # before 2.6 files load as in MMEngine
    with _allowing():
        file = file if isinstance(file, str) else io.BytesIO(file.getvalue())
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))


def last_read() -> str:
    """Return the path or the address of the checkpoint that this context has read last."""
    return _last_read.get()


def _describe_unreadable(path: str, error: Exception) -> str:
    kind = describe_no_checkpoint(os.path.expanduser(path))
    if kind is not None:
        return f'checkpoint {path} is {kind}.'
    if isinstance(error, (OSError, KeyError)) and not os.path.isfile(path):
        return (
            f'checkpoint {path} cannot be read: {type(error).__name__}: {first_line(error)} '
            f'Expected the path of a file, or an address that can be reached; correct it.'
        )
    # PyTorch's advice follows the first sentence, for example to trust the file.
    reason = f'{type(error).__name__}: {first_line(error)}'.split('. ')[0].rstrip('.')
    return (
        f'checkpoint {path} cannot be read: {reason}. It is truncated, damaged or no checkpoint '
        f'of PyTorch; take the one before it, or copy it again.'
    )


def _load_safely(
    load: Callable,
    forced: bool,
    f: object,
    map_location: object = None,
    pickle_module: object = None,
    **options: object,
) -> Any:
    """``torch.load`` with a list of allowed classes, which no environment variable disables."""
    weights_only = options.pop('weights_only', None)
    asks_for_code = weights_only is False or (weights_only is None and pickle_module is not None)
    if asks_for_code and not forced or not ALLOWS_RENAMED_CLASSES:
        # Before 2.6 PyTorch cannot be told which classes are MMEngine's: files load as there.
        if weights_only is not None and TAKES_WEIGHTS_ONLY:
            options['weights_only'] = weights_only
        # Before PyTorch 1.13 its default is the module `pickle`, and None an error.
        module = () if pickle_module is None else (pickle_module,)
        return load(f, map_location, *module, **options)
    with _allowing():
        return load(f, map_location, weights_only=True, **options)


@contextmanager
def _allowing() -> Iterator[None]:
    """Add the classes in MMEngine's checkpoints to those that PyTorch allows."""
    with _process_wide:
        # Classes that were allowed before stay allowed afterwards.
        known = torch.serialization.get_safe_globals()
        added = [each for each in (*_trusted, *_ALLOWED) if each not in known]
        with torch.serialization.safe_globals(added):
            yield


def _first_refused(error: Exception) -> Optional[str]:
    """The class that PyTorch's unpickler names; None if it names none, as for a damaged file."""
    named = re.search(r"GLOBAL (\S+)|(\S+) is not allowed|but got <class '(\S+)'>", str(error))
    if named is not None:
        return ' '.join(filter(None, named.groups()))
    return first_line(error) if 'not allowed' in str(error) else None
