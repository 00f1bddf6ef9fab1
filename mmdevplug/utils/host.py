"""Measure the memory and cores of this host."""

import os
from pathlib import Path
from typing import Optional, Tuple

import psutil


def usable_cores() -> int:
    """The cores that this process may run on."""
    affinity = getattr(os, 'sched_getaffinity', None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def available_memory(root: str = '/sys/fs/cgroup') -> Tuple[int, str]:
    """Bytes that processes may still take, and who says so.

    Args:
        root (str): Where control groups are mounted.
    """
    host = psutil.virtual_memory().available
    for limit, used in (
        ('memory.max', 'memory.current'),
        ('memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes'),
    ):
        left = _left_in_group(Path(root) / limit, Path(root) / used)
        if left is not None and left < host:
            return left, f'limited by {Path(root) / limit}'
    return host, 'of the host'


def _left_in_group(limit: Path, used: Path) -> Optional[int]:
    try:
        left = int(limit.read_text()) - int(used.read_text()) + _inactive_files(used.parent)
    except (OSError, ValueError):
        return None  # no such group, or 'max': no limit
    return max(0, left)


def _inactive_files(group: Path) -> int:
    """Bytes of files that the kernel keeps in memory until a process needs the room."""
    try:
        lines = (group / 'memory.stat').read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(found.get('total_inactive_file', found.get('inactive_file', 0)))
