"""Section *limits*: open files, shared memory, memory, disk and cores."""

import os
import resource
import shutil
from pathlib import Path
from typing import Iterator, Mapping, Optional

import torch

from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.host import available_memory, usable_cores

from .findings import Finding, Section

section = Section('limits')

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
) -> Iterator[Finding]:
    """Compare the limits of this host with what a job needs; ``work_dir`` is not made."""
    yield _open_files(ranks)
    if os.path.isdir('/dev/shm'):  # on Linux
        yield _shared_memory('/dev/shm')
    yield _memory(ranks)
    yield _disk(work_dir)
    yield _threads(ranks, (os.environ if environ is None else environ).get('OMP_NUM_THREADS'))


def _open_files(ranks: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_FILES + FILES_PER_RANK * ranks
    comfortable = max(needed, COMFORTABLE_FILES)
    found = f'open files: at most {soft} for each process (hard limit {hard})'
    if soft == resource.RLIM_INFINITY or soft >= comfortable:
        return section.ok(found)
    if 0 <= hard < needed:
        remedy = f'echo "* hard nofile {comfortable}" | sudo tee -a /etc/security/limits.conf'
    else:
        limit = comfortable if hard == resource.RLIM_INFINITY else min(comfortable, hard)
        remedy = f'ulimit -n {limit}'
    return section.finding(
        'error' if soft < needed else 'warning',
        found,
        f'gloo connects every rank with every other: {ranks} rank(s) need about {needed}, and '
        f'data loaders pass tensors through open files.',
        remedy,
    )


def _shared_memory(folder: str) -> Finding:
    total, _, free = shutil.disk_usage(folder)
    found = f'shared memory: {format_bytes(free)} of {format_bytes(total)} free in {folder}'
    if free >= COMFORTABLE_SHARED:
        return section.ok(found)
    remedy = f'ls -l {folder}  # and remove what ended jobs left'
    if total < COMFORTABLE_SHARED:
        remedy = (
            f'sudo mount -o remount,size=8G {folder}  # in a container: docker run --shm-size=8g'
        )
    return section.warning(
        found,
        'workers of data loaders pass batches through it, and end with "bus error" or "No space '
        'left on device" where it is full.',
        remedy,
    )


def _memory(ranks: int) -> Finding:
    available, origin = available_memory()
    found = f'memory: {format_bytes(available)} available ({origin})'
    needed = ranks * BYTES_PER_RANK
    if available >= 2 * needed:
        return section.ok(found)
    return section.finding(
        'error' if available < needed else 'warning',
        found,
        f'{ranks} process(es) need about {format_bytes(needed)} before any model or data; a '
        f'process that finds none is killed without a message.',
        f'mmdevplug train CONFIG --nproc {max(1, available // (2 * BYTES_PER_RANK))}',
    )


def _disk(work_dir: str) -> Finding:
    folder = Path(work_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(str(folder), os.W_OK):
        return section.error(
            f'work dir {work_dir}: {folder} takes no files',
            'logs and checkpoints cannot be written.',
            'mmdevplug train CONFIG --work-dir FOLDER  # a writable folder',
        )
    free = shutil.disk_usage(str(folder)).free
    found = f'disk: {format_bytes(free)} free at {folder}, for work dir {work_dir}'
    if free >= COMFORTABLE_DISK:
        return section.ok(found)
    return section.finding(
        'error' if free < LEAST_DISK else 'warning',
        found,
        'a checkpoint that finds no room ends the training.',
        'mmdevplug train CONFIG --work-dir FOLDER  # on another disk',
    )


def _threads(ranks: int, value: Optional[str]) -> Finding:
    cores = usable_cores()
    remedy = f'export OMP_NUM_THREADS={max(1, cores // ranks)}'
    if value is not None and not (value.strip().isdigit() and int(value) > 0):
        return section.warning(
            f'OMP_NUM_THREADS={value!r}',
            'expected a number of 1 or more; OpenMP starts as many threads as there are cores.',
            remedy,
        )
    # Without the variable torchrun gives each of several processes one thread.
    threads = 1 if ranks > 1 else torch.get_num_threads()
    threads = threads if value is None else int(value)
    found = f'{cores} core(s) for {ranks} process(es) of {threads} thread(s)'
    if threads * ranks <= cores:
        return section.ok(found)
    why = 'threads that share a core wait for each other.'
    if threads > 1:
        return section.warning(found, why, remedy)
    return section.note(found, why, f'mmdevplug train CONFIG --nproc {cores}')
