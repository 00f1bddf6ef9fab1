"""Measure the memory and cores of this host, and keep freed memory for the next iteration."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Iterator, NamedTuple, Optional

import psutil

#: What ``mallopt`` of glibc sets: its number there, the setting, and a factor of a size. Blocks
#: up to the first come from memory that was freed before; of that the second is kept, the third
#: where a thread allocates.
_KEPT = ((-3, 'mmap_threshold', 1), (-1, 'trim_threshold', 8), (-2, 'top_pad', 2))
#: The largest blocks that glibc keeps.
LARGEST = 32 << 20
#: States of a process that has ended.
GONE_STATES = ('Z', 'X', '-')
CGROUPS = '/sys/fs/cgroup'


def keep_freed_memory(largest: int = LARGEST) -> bool:
    """Have glibc keep what an iteration frees, for the next; return whether it does.

    By default it returns large blocks to the kernel, which clears every page again that the next
    iteration touches. Blocks above ``largest`` are returned all the same. What the environment
    sets is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if os.name == 'posix' else None
    tunables = os.environ.get('GLIBC_TUNABLES', '')
    for _, name, _ in _KEPT:
        if f'MALLOC_{name.upper()}_' in os.environ or f'glibc.malloc.{name}' in tunables:
            return False
    if mallopt is None:
        return False
    done = 0
    for number, _, factor in _KEPT:
        done += mallopt(number, factor * largest)  # 1, or 0 where it refuses a size
    return done == len(_KEPT)


def usable_cores(root: str = CGROUPS) -> int:
    """The cores that this process may run on, or the time of as many that it may take.

    ``root`` is the mount point of control groups.
    """
    affinity = getattr(os, 'sched_getaffinity', None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for names in (['cpu.max'], ['cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us']):
        try:
            words = ' '.join((Path(root) / name).read_text() for name in names).split()
            quota, period = map(int, words)
        except (OSError, ValueError):
            continue  # no such group, or no limit: 'max'
        if quota > 0:  # -1 is no limit, too
            cores = min(cores, -(-quota // period))
    return cores


class Memory(NamedTuple):
    """The memory that processes of this host or container may still take, in bytes."""

    available: int
    #: Of the control group that allows least; None where the host has less left.
    limit: Optional[int] = None

    def __str__(self) -> str:
        from .byte_sizes import format_bytes

        text = format_bytes(self.available)
        if self.limit is None:
            return text
        return f'{text}, of {format_bytes(self.limit)} by the limit of this container'


def available_memory(root: str = CGROUPS, groups: str = '/proc/self/cgroup') -> Memory:
    """Measure the memory that is free here, within the limits of control groups (v1 and v2)."""
    found = Memory(psutil.virtual_memory().available)
    for folder in _memory_groups(root, groups):
        for names in (
            ('memory.max', 'memory.current', 'inactive_file'),
            ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
        ):
            with suppress(OSError, ValueError):  # no such file, or no limit: 'max'
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                # Pages of files are given back when memory is short.
                kept = used - _counted(folder / 'memory.stat', names[2])
                if limit - kept < found.available:
                    found = Memory(max(0, limit - kept), limit)
    return found


def memory_kills(root: str = CGROUPS, groups: str = '/proc/self/cgroup') -> int:
    """Count the processes that the kernel has ended here because a control group had no memory."""
    files = ('memory.events', 'memory.oom_control')
    counts = (
        _counted(each / f, 'oom_kill') for each in _memory_groups(root, groups) for f in files
    )
    return max(counts, default=0)


def _memory_groups(root: str, groups: str) -> Iterator[Path]:
    """The folders of control groups that limit the memory of this process, inner ones first."""
    lines = []
    with suppress(OSError):
        lines = Path(groups).read_text().splitlines()
    for line in lines:
        _, kinds, place = line.split(':', 2)
        if kinds and 'memory' not in kinds.split(','):
            continue
        top = Path(root, 'memory' if kinds else '')
        inner = top / place.lstrip('/')  # in a container, often a name of the host
        yield from (each for each in (inner, *inner.parents) if top in (each, *each.parents))


def _counted(file: Path, name: str) -> int:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return 0


def host_name() -> str:
    """The name of this host; containers and network namespaces count as hosts."""
    try:
        with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as file:
            return f'{file.read().strip()}/{os.stat("/proc/self/ns/net").st_ino}'
    except OSError:
        return f'{os.uname().nodename}'


def process_state(pid: int) -> str:
    """The letter of a process's state: Z and X have ended, T is stopped; '-' if there is none."""
    try:
        # The state follows the name, which is in parentheses and may contain any character.
        return Path(f'/proc/{pid}/stat').read_text(errors='replace').rpartition(')')[2].split()[0]
    except OSError:
        return '-' if Path('/proc/self/stat').exists() else ''


def has_ended(pid: int) -> bool:
    """Whether a process of this host is gone, or only its exit status is left."""
    return process_state(pid) in GONE_STATES
