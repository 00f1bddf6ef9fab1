"""Explain that the workers of a data loader found no room in shared memory."""

import os
import re
import shutil
from contextlib import contextmanager
from typing import Any, Iterator

from mmdevplug.errors import DeviceOutOfMemoryError, DevPlugError
from mmdevplug.utils.byte_sizes import format_bytes

FOLDER = '/dev/shm'
#: What PyTorch says: where it reserves room first, and where a worker is killed for lack of it.
_FULL = re.compile(
    r'^.*(?:</torch_\S+>.*(?:No space left|Cannot allocate)|out of shared memory).*$',
    re.IGNORECASE | re.MULTILINE,
)


@contextmanager
def explain_shared_memory(runner: Any, stage: str) -> Iterator[None]:
    """Replace errors of full shared memory by one that says how to get more.

    Its stage is ``'train'``, ``'val'`` or ``'test'``: that data loader is named.
    """
    try:
        yield
    except RuntimeError as error:
        # Where a worker is killed, PyTorch raises that "it exited" from the error that says why.
        found = _FULL.search(f'{error}\n{error.__cause__}')
        if found is None or isinstance(error, DevPlugError) or not os.path.isdir(FOLDER):
            raise
        raise DeviceOutOfMemoryError(_message(runner, stage, found.group().strip())) from error


def _message(runner: Any, stage: str, said: str) -> str:
    key = f'{stage}_dataloader'
    loader = getattr(runner, key, None)
    workers = getattr(loader, 'num_workers', None)
    found = '' if workers is None else f' (it is {workers})'
    return (
        f'rank {runner.rank}: the workers of {key} pass batches through {FOLDER}, which has '
        f'{format_bytes(shutil.disk_usage(FOLDER).total)} and no room left: {said} '
        f'Make it larger: docker run --shm-size=8g; in Kubernetes mount an emptyDir with medium: '
        f'Memory at {FOLDER}. Or take a smaller {key}.batch_size, or fewer {key}.num_workers'
        f'{found}; 0 needs none.'
    )
