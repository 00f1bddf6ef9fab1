"""Section *limits*: open files, shared memory, memory, disk and cores."""

import os
import resource
import shutil
from pathlib import Path
from typing import Iterator, List, Mapping, Optional

from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.host import available_memory, usable_cores

from .findings import Finding

SECTION = 'limits'

GB = 1 << 30
#: What Python, PyTorch and a few loader processes keep open beside the connections of gloo.
BASE_FILES = 64
FILES_PER_RANK = 4
COMFORTABLE_FILES = 1024
COMFORTABLE_SHARED = 1 * GB
#: What a process needs before its model: PyTorch itself.
BYTES_PER_RANK = GB // 2
COMFORTABLE_DISK, LEAST_DISK = 5 * GB, GB // 5


def examine(
    ranks: int = 1, work_dir: str = 'work_dirs', environ: Optional[Mapping[str, str]] = None
) -> List[Finding]:
    """Look at what a job of so many processes on this host would run into.

    Args:
        ranks (int): Defaults to 1.
        work_dir (str): Where checkpoints would go; it is not made. Defaults to ``'work_dirs'``.
        environ (Mapping, optional): Defaults to None: ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    return [
        *_open_files(ranks),
        *_shared_memory(),
        *_memory(ranks),
        *_disk(work_dir),
        *_threads(ranks, environ),
    ]


def _open_files(ranks: int) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_FILES + FILES_PER_RANK * ranks
    found = f'open files: at most {soft} for each process (hard limit {hard})'
    why = (
        f'gloo connects every rank with every other: {ranks} rank(s) need about {needed}, and '
        f'data loaders pass tensors through open files.'
    )
    wanted = max(needed, COMFORTABLE_FILES)
    remedy = f'ulimit -n {wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)}'
    if 0 <= hard < needed:
        remedy = f'echo "* hard nofile {wanted}" | sudo tee -a /etc/security/limits.conf'
    if soft != resource.RLIM_INFINITY and soft < wanted:
        yield Finding(SECTION, 'error' if soft < needed else 'warning', found, why, remedy)
    else:
        yield Finding(SECTION, 'ok', found)


def _shared_memory(folder: str = '/dev/shm') -> Iterator[Finding]:
    if not os.path.isdir(folder):
        return  # no Linux
    total, _, free = shutil.disk_usage(folder)
    found = f'shared memory: {format_bytes(free)} of {format_bytes(total)} free in {folder}'
    if free >= COMFORTABLE_SHARED:
        yield Finding(SECTION, 'ok', found)
        return
    full = total >= COMFORTABLE_SHARED
    yield Finding(
        SECTION,
        'warning',
        found,
        'processes of data loaders end with "bus error", and gradients of one host are averaged '
        'there.',
        f'ls -l {folder}  # and remove what ended jobs left'
        if full
        else f'sudo mount -o remount,size=8G {folder}  # in a container: docker run --shm-size=8g',
    )


def _memory(ranks: int) -> Iterator[Finding]:
    available, origin = available_memory()
    found = f'memory: {format_bytes(available)} available ({origin})'
    needed = ranks * BYTES_PER_RANK
    if available >= 2 * needed:
        yield Finding(SECTION, 'ok', found)
        return
    yield Finding(
        SECTION,
        'error' if available < needed else 'warning',
        found,
        f'{ranks} process(es) need about {format_bytes(needed)} before any model or data; a '
        f'process that finds none is killed without a message.',
        f'mmdevplug train CONFIG --nproc {max(1, available // (2 * BYTES_PER_RANK))}',
    )


def _disk(work_dir: str) -> Iterator[Finding]:
    folder = Path(work_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(str(folder), os.W_OK):
        yield Finding(
            SECTION,
            'error',
            f'work dir {work_dir}: {folder} takes no files',
            'logs and checkpoints cannot be written.',
            'mmdevplug train CONFIG --work-dir FOLDER  # one that may be written to',
        )
        return
    free = shutil.disk_usage(str(folder)).free
    found = f'disk: {format_bytes(free)} free at {folder}, for work dir {work_dir}'
    if free >= COMFORTABLE_DISK:
        yield Finding(SECTION, 'ok', found)
        return
    yield Finding(
        SECTION,
        'error' if free < LEAST_DISK else 'warning',
        found,
        'a checkpoint that finds no room ends the training.',
        'mmdevplug train CONFIG --work-dir FOLDER  # on another disk',
    )


def _threads(ranks: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    cores = usable_cores()
    value = environ.get('OMP_NUM_THREADS')
    if value is not None and not (value.strip().isdigit() and int(value) > 0):
        yield Finding(
            SECTION,
            'warning',
            f'OMP_NUM_THREADS={value!r}',
            'expected a number of 1 or more; OpenMP takes as many threads as there are cores.',
            f'export OMP_NUM_THREADS={max(1, cores // ranks)}',
        )
        return
    # Without the variable torchrun gives each of several processes one thread.
    threads = int(value) if value is not None else (1 if ranks > 1 else cores)
    found = f'{cores} core(s) for {ranks} process(es) of {threads} thread(s)'
    if threads * ranks <= cores:
        yield Finding(SECTION, 'ok', found)
        return
    level = 'warning' if threads > 1 else 'note'
    yield Finding(
        SECTION,
        level,
        found,
        'threads that share a core wait for each other.',
        f'export OMP_NUM_THREADS={max(1, cores // ranks)}'
        if threads > 1
        else f'mmdevplug train CONFIG --nproc {cores}',
    )
