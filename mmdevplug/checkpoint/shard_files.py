"""The files beside a checkpoint that hold the shards of its tensors: where they are, and whole."""

import os
import re
import zlib
from pathlib import Path
from typing import Dict

from mmdevplug.errors import CheckpointError
from mmdevplug.utils.annotations import SavedState

from .writing import SHARDS, SUMS, PathLike

#: Names that PyTorch gives to the files of a rank, and to the index that rank 0 writes.
_FILE = re.compile(r'(state_dict|optimizer)/(\.metadata|__\d+_\d+\.distcp)')
_STRETCH = 4 << 20


def shards_folder(path: PathLike, checkpoint: SavedState) -> str:
    """Return the folder of a checkpoint's shards: beside the file, and named after it.

    What the file says decides on the end of the name alone: ``epoch_1.pth`` has ``epoch_1.shards``
    or ``epoch_1.shards-2``.

    Raises:
        CheckpointError: If the file names anything else.
    """
    name, file = checkpoint[SHARDS], Path(os.path.expanduser(str(path)))
    end = re.fullmatch(rf'[^/\\]+(\.{SHARDS}(-\d+)?)', name) if isinstance(name, str) else None
    if end is None:
        raise CheckpointError(
            f'checkpoint {path} names {name!r} as the folder of its shards; expected '
            f"'{file.stem}.{SHARDS}', beside the file. It was not written by mmdevplug: do not "
            f'load it.'
        )
    return str(file.with_name(file.stem + end.group(1)))


def sums_of_rank(folder: str, rank: int) -> Dict[str, int]:
    """Return the checksums of the files that a rank has written into a folder of shards."""
    found = {}
    for path in sorted(Path(folder).glob('*/*')):
        if path.name.startswith(f'__{rank}_') or (path.name == '.metadata' and rank == 0):
            found[f'{path.parent.name}/{path.name}'] = _sum_of(path)
    return found


def check_shards(path: PathLike, checkpoint: SavedState) -> None:
    """Compare the shards of a checkpoint with the checksums that it holds.

    Raises:
        CheckpointError: If one is damaged or not there, or the checkpoint holds no checksums.
    """
    folder, sums = shards_folder(path, checkpoint), checkpoint.get(SUMS)
    if not isinstance(sums, dict) or not all(_FILE.fullmatch(str(name)) for name in sums):
        raise CheckpointError(
            f'checkpoint {path} holds no checksums of its shards; expected the key {SUMS!r}. Save '
            f'it with this release.'
        )
    for name, expected in sums.items():
        file = Path(folder, name)
        if not file.is_file():
            raise CheckpointError(f'{path} needs {file}, which is not there. Copy it, too')
        if _sum_of(file) != expected:
            raise CheckpointError(f'{file} is damaged: it differs from its checksum in {path}')


def _sum_of(path: Path) -> int:
    found = 0
    with open(str(path), 'rb') as file:
        for part in iter(lambda: file.read(_STRETCH), b''):
            found = zlib.crc32(part, found)
    return found
