"""Write a checkpoint to a temporary file, then rename it: a crash keeps the earlier ones."""

import copyreg
import glob
import io
import os
import pickle
import shutil
from collections import defaultdict, deque
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Dict, Iterator, Optional

import torch
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.runner.checkpoint import save_checkpoint

from mmdevplug.errors import CheckpointError, first_line
from mmdevplug.patches.torch_load import refused_names
from mmdevplug.utils import atomic_files
from mmdevplug.utils.annotations import Checkpoint
from mmdevplug.utils.atomic_files import UNFINISHED, PathLike
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.logs import log_warning
from mmdevplug.utils.progress import show_progress
from mmdevplug.utils.pytree import tensor_bytes, tensors_in

#: Files in a work directory: the newest checkpoint, when the run began, and its end.
POINTER, STARTED, FINISHED = 'last_checkpoint', '.started', '.finished'
#: In a checkpoint: the name of the folder beside it that has its tensors, see ``sharding``.
SHARDS = 'shards'
#: Also there: the checksums of the files in that folder.
SUMS = 'shard_sums'
#: Each time this many bytes are there, the disk begins to write them.
_STRETCH = 32 << 20


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


def write_text(text: str, path: Path) -> None:
    """Write a small file; raise CheckpointError if the disk refuses it."""
    with explaining(f'write {path}', path.parent):
        atomic_files.write_text(text, path)


def write_checkpoint(
    checkpoint: Checkpoint, path: str, backend_args: Optional[Dict[str, object]] = None
) -> None:
    """Write a checkpoint of host tensors to a local path or an address; raise CheckpointError."""

    def doing() -> str:
        return f'writing {format_bytes(sum(map(tensor_bytes, tensors_in(checkpoint))))} to {path}'

    with show_progress(doing):
        if not is_local(path, backend_args):
            # Object stores keep whole objects or none.
            save_checkpoint(checkpoint, path, backend_args=backend_args)
            return
        folder = os.path.dirname(path)
        make_folder(folder)
        with explaining(f'write {path}', folder), atomic_files.replacing(path) as part:
            # Straight into the file: MMEngine makes two copies of all of it in memory before.
            with _File(io.FileIO(str(part), 'w')) as file:
                save_with_warning(checkpoint, file, path)
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


_PICKLE = SimpleNamespace(**dict(vars(pickle), Pickler=_Pickler))


def save_with_warning(value: object, file: IO[bytes], path: str) -> None:
    """Call ``torch.save``, and name what ``weights_only`` would refuse when the file is read."""
    try:
        torch.save(value, file, pickle_module=_PICKLE)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise CheckpointError(
            f'{path} cannot be written: {_place_of(value) or "an object in it"}: {error}. Keep '
            f'numbers, strings, tensors and containers of these there.'
        ) from error
    file.flush()
    failed = getattr(file, 'error', None)
    if failed is not None:
        raise failed
    for name in refused_names(getattr(file, 'name', file)):
        log_warning(
            f'{path} cannot be resumed from: {_place_of(value, name) or "an object"} needs '
            f'{name}, which is refused when the file is read. Keep numbers, strings, tensors and '
            f'containers of these; or trust it: checkpoint_classes=[{name!r}] in the config.'
        )


def _place_of(value: object, name: str = '') -> str:
    """Where a nested value holds a class, or what cannot be pickled: ``['message_hub']['f']``."""
    parts = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    named = '\n'.join(name.rsplit('.', 1)).encode()  # as pickle writes it

    class Bare(_Pickler):
        persistent_id = staticmethod(lambda value: isinstance(value, torch.Tensor) or None)

    for key, part in parts.items() if isinstance(parts, dict) else ():
        pickled = io.BytesIO()
        try:
            Bare(pickled, 2).dump(part)
        except (AttributeError, TypeError, pickle.PicklingError):
            return f'[{key!r}]{_place_of(part, name)}'
        if name and named in pickled.getvalue():
            return f'[{key!r}]{_place_of(part, name)}'
    return ''


class _File(io.BufferedWriter):
    """A file that keeps its first error: PyTorch 1's writer aborts the process after one.

    The disk writes what is there while the rest is made, so that the flush at the end waits for
    little.
    """

    error: Optional[OSError] = None
    _written = _begun = 0

    def write(self, data: Any) -> int:
        """Write unless an earlier call failed, and return the full length in any case."""
        try:
            if self.error is None:
                super().write(data)
        except OSError as error:
            self.error = error
        self._written += len(data)
        stretch = self._written - self._begun
        if stretch >= _STRETCH and hasattr(os, 'posix_fadvise') and self.error is None:
            # Linux begins to write what is not needed in memory, and does not wait.
            with suppress(OSError):  # the flush at the end reports errors
                os.posix_fadvise(self.fileno(), self._begun, stretch, os.POSIX_FADV_DONTNEED)
            self._begun = self._written
        return len(data)

    def flush(self) -> None:
        """Hand what was written to the system, unless an earlier call failed."""
        try:
            if self.error is None:
                super().flush()
        except OSError as error:
            self.error = error


def is_local(path: str, backend_args: Optional[Dict[str, object]] = None) -> bool:
    """Whether a path is on a file system of this host."""
    return isinstance(get_file_backend(path, backend_args=backend_args), LocalBackend)


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
