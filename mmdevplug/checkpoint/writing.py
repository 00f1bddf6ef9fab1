"""Write a checkpoint to a temporary file, then rename it: a crash keeps the earlier ones."""

import copyreg
import ctypes
import functools
import glob
import io
import os
import pickle
import shutil
from collections import defaultdict, deque
from contextlib import contextmanager, suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Set

import numpy as np
import torch
from mmengine.fileio import LocalBackend, get_file_backend, join_path
from mmengine.runner.checkpoint import save_checkpoint

from mmdevplug.errors import CheckpointError, first_line
from mmdevplug.patches.torch_load import refused_names
from mmdevplug.utils import atomic_files
from mmdevplug.utils.atomic_files import UNFINISHED, PathLike
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.progress import log_progress
from mmdevplug.utils.pytree import tensor_bytes, tensors_in

#: Files in a work directory: the newest checkpoint, when the run began, and its end.
POINTER, STARTED, FINISHED = 'last_checkpoint', '.started', '.finished'
#: In a checkpoint: the name of the folder beside it that has its tensors, see ``sharding``.
SHARDS = 'shards'
#: Each time this many bytes are there, the disk begins to write them.
_STRETCH = 32 << 20
#: SYNC_FILE_RANGE_WRITE of Linux: begin to write, and do not wait.
_BEGIN = 2


@contextmanager
def explaining(what: str, folder: PathLike) -> Iterator[None]:
    """Raise CheckpointError if the disk refuses something."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # PyTorch's writer reports what the disk says as RuntimeError.
        if isinstance(error, CheckpointError):
            raise
        with suppress(OSError):
            free = format_bytes(shutil.disk_usage(str(folder)).free)
            what = f'{what} ({free} are free there)'
        raise CheckpointError(
            f'cannot {what}: {type(error).__name__}: {first_line(error)}. What was saved before '
            f'is untouched. Make room or mend the permissions, or choose another folder: '
            f'default_hooks.checkpoint.out_dir or --work-dir.'
        ) from error


@contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """Write a file of a run; raise CheckpointError if :func:`atomic_files.replacing` cannot."""
    with explaining(f'write {path}', Path(path).parent):
        with atomic_files.replacing(path) as unfinished:
            yield unfinished


def write_text(text: str, path: PathLike) -> None:
    """Write a small file; see :func:`replacing`."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding='utf-8')


def write_checkpoint(
    checkpoint: Dict[str, Any], path: str, backend_args: Optional[Dict[str, Any]] = None
) -> None:
    """Write a checkpoint of host tensors to a local path or an address; raise CheckpointError."""
    size = format_bytes(sum(map(tensor_bytes, tensors_in(checkpoint))))
    if not is_local(path, backend_args):
        # Object stores keep whole objects or none.
        with log_progress(f'writing {size} to {path}'):
            save_checkpoint(checkpoint, path, backend_args=backend_args)
        return
    make_folder(os.path.dirname(path))
    with replacing(path) as unfinished, log_progress(f'writing {size} to {path}'):
        # Straight into the file: MMEngine makes two copies of all of it in memory before.
        with open(str(unfinished), 'wb') as file:
            held = _HoldingErrors(file)
            save_with_warning(checkpoint, held, path)
        if held.error is not None:
            raise held.error
    remove_shards(path, checkpoint.get(SHARDS))


def remove_shards(path: str, used: Optional[str] = None) -> None:
    """Remove the folders with shards of a checkpoint, but the one that it uses."""
    for folder in glob.glob(f'{glob.escape(os.path.splitext(path)[0])}.{SHARDS}*'):
        if os.path.basename(folder) != used:
            shutil.rmtree(folder, ignore_errors=True)


class _Pickler(pickle.Pickler):
    """Write deques and defaultdicts as calls with all of their items as arguments.

    PyTorch's ``weights_only`` loader refuses to fill them item by item.
    """

    dispatch_table = copyreg.dispatch_table.copy()
    dispatch_table[deque] = lambda value: (deque, (list(value), value.maxlen))
    # A function in it could not be loaded; MMEngine's own checkpoints hold none either.
    dispatch_table[defaultdict] = lambda value: (
        defaultdict,
        (value.default_factory if isinstance(value.default_factory, type) else None, dict(value)),
    )


def save_with_warning(value: Any, file: Any, path: str) -> None:
    """Call ``torch.save``, and name what ``weights_only`` would refuse when the file is read."""
    named: List[Any] = []

    class Pickler(_Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, (type, FunctionType, BuiltinFunctionType, np.dtype)):
                named.append(value)  # once each: the memo has it from then on
            return NotImplemented

    module = SimpleNamespace(**dict(vars(pickle), Pickler=Pickler))
    try:
        torch.save(value, file, pickle_module=module)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise CheckpointError(
            f'{path} cannot be written: {_unpicklable(value) or "an object in it"}: {error}. Keep '
            f'numbers, strings, tensors and containers of these there.'
        ) from error
    for each in refused_names(named):
        name = f'{each.__module__}.{each.__qualname__}'
        log_warning(
            f'{path} cannot be resumed from: {_place_of(each, value) or "an object"} needs '
            f'{name}, which is refused when the file is read. Keep numbers, strings, tensors and '
            f'containers of these; or trust it: checkpoint_classes=[{name!r}] in the config.'
        )


def _unpicklable(value: Any) -> str:
    """Where a nested value holds what cannot be pickled, such as ``['message_hub']['f']``."""
    parts = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    for key, part in parts.items() if isinstance(parts, dict) else ():
        try:
            _Pickler(io.BytesIO(), 2).dump(part)
        except (AttributeError, TypeError, pickle.PicklingError):
            return f'[{key!r}]{_unpicklable(part)}'
    return ''


def _place_of(kind: Any, value: Any, seen: Optional[Set[int]] = None) -> Optional[str]:
    """Where a nested value holds a class or an object of it, such as ``['meta']['source']``."""
    seen = set() if seen is None else seen
    if value is kind or kind in (type(value), type(getattr(value, 'dtype', None))):
        return ''
    if id(value) in seen or isinstance(value, torch.Tensor):
        return None
    seen.add(id(value))
    parts = value if isinstance(value, dict) else getattr(value, '__dict__', {})
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = dict(enumerate(value))
    for key, part in parts.items():
        found = _place_of(kind, part, seen)
        if found is not None:
            return f'[{key!r}]{found}'
    return None


@functools.lru_cache(maxsize=None)
def _sync_file_range() -> Optional[Callable[..., int]]:
    """Linux's call of that name, None where there is none."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # no Linux; TypeError on Windows
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


class _HoldingErrors:
    """A file that keeps its first error: PyTorch 1's writer aborts the process after one.

    The disk writes what is there while the rest is made, so that the flush at the end waits for
    little.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: Optional[OSError] = None
        self._file = file
        self._written = self._begun = 0

    def __str__(self) -> str:
        return str(self._file.name)

    def write(self, data: bytes) -> int:
        """Write unless an earlier call failed, and return the full length in any case."""
        self._attempt(self._file.write, data)
        self._written += len(data)
        if self._written - self._begun >= _STRETCH:
            call = _sync_file_range()
            if call is not None and self.error is None:
                # What it cannot do, the flush at the end does; that reports errors, too.
                call(self._file.fileno(), self._begun, self._written - self._begun, _BEGIN)
            self._begun = self._written
        return len(data)

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._attempt(self._file.flush)

    def _attempt(self, function: Callable[..., Any], *args: object) -> None:
        if self.error is None:
            try:
                function(*args)
            except OSError as error:
                self.error = error


def is_local(path: str, backend_args: Optional[Dict[str, Any]] = None) -> bool:
    """Whether a path is on a file system of this host."""
    return isinstance(get_file_backend(path, backend_args=backend_args), LocalBackend)


def join(folder: str, name: str, backend_args: Optional[Dict[str, Any]] = None) -> str:
    """Join a folder, local or remote, and a file's name."""
    return str(join_path(str(folder), name, backend_args=backend_args))


def make_folder(folder: PathLike) -> None:
    """Make a folder unless it exists; raise CheckpointError if that fails."""
    with explaining(f'make the folder {folder}', folder):
        os.makedirs(str(folder) or '.', exist_ok=True)


def remove_unfinished(folder: PathLike) -> int:
    """Remove the files that killed processes left half-written; return how many there were.

    One process of a job calls this, before any of them writes.
    """
    left = list(Path(folder).glob(f'*{UNFINISHED}*'))
    for path in left:
        path.unlink()
    return len(left)


# marks of a run in its folder --------------------------------------------------------------------


def write_pointer(work_dir: PathLike, checkpoint: str) -> None:
    """Write the path of the newest checkpoint to ``last_checkpoint``, as MMEngine does."""
    write_text(str(checkpoint), Path(work_dir) / POINTER)


def mark_start(work_dir: PathLike) -> None:
    """Note when a run began from scratch, so that a restart ignores older files."""
    write_text('', Path(work_dir) / STARTED)


def mark_finished(work_dir: PathLike) -> None:
    """Note that a run has ended, its last validation included."""
    write_text('', Path(work_dir) / FINISHED)
