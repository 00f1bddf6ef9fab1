"""Memory that the ranks of one host share.

Each rank makes an anonymous file in memory and opens those of the others through ``/proc``. The
files have no names, so nothing stays behind when a job is killed. ``/dev/shm`` is not used: it is
small in containers.
"""

import mmap
import os
import warnings
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

#: Gives every rank what each of them passes, of what JSON can write, in the order of ranks.
Gather = Callable[[object], List[Any]]


def group_by_host(names: Sequence[str]) -> List[List[int]]:
    """The ranks of each host, in ascending order, by the names of their hosts."""
    ranks: Dict[str, List[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return list(ranks.values())


class SharedPart(NamedTuple):
    """Describe the memory of one rank, which all ranks of its host can read and write."""

    rank: int
    pid: int
    memory: mmap.mmap


def share_memory(
    size: int, here: Sequence[int], gather: Gather, rank: int
) -> Optional[List[SharedPart]]:
    """Give each rank of a host memory that all ranks of this host, ``here``, can read and write.

    Returns that of each of them, or None on all ranks if any could not share. The size, in bytes,
    is the same on all ranks.
    """
    file, inode, error = None, None, None
    try:
        file = os.memfd_create('mmdevplug-gradients')
        inode = os.fstat(file).st_ino
        os.posix_fallocate(file, 0, size)  # now, while a lack of memory is still an error
    except (OSError, AttributeError) as caught:
        error = f'{type(caught).__name__}: {caught} (asked for {size} bytes)'[:500]
    files = gather(dict(pid=os.getpid(), file=file, inode=inode, error=error))
    errors = [other['error'] for other in files]
    shared: List[SharedPart] = []
    if not any(errors):
        try:
            shared = [
                SharedPart(each, files[each]['pid'], _map(files[each], size)) for each in here
            ]
        except OSError as caught:
            error = f'{type(caught).__name__}: {caught}'[:500]
        # Each rank keeps its file open until all ranks have opened it: this message waits.
        errors = gather(error)
    if file is not None:
        os.close(file)
    if not any(errors):
        return shared
    if rank == 0:
        failed = next(f'rank {each}: {text}' for each, text in enumerate(errors) if text)
        warnings.warn(
            f'Tensors travel between the ranks of a host over its loopback interface, because '
            f'they cannot share memory: {failed}',
            stacklevel=2,
        )
    return None


def _map(owner: Mapping[str, int], size: int) -> mmap.mmap:
    """Map the file of another process."""
    file = os.open(f'/proc/{owner["pid"]}/fd/{owner["file"]}', os.O_RDWR)
    try:
        if os.fstat(file).st_ino != owner['inode']:
            raise OSError(f'process {owner["pid"]} is another one in this PID namespace')
        return mmap.mmap(file, size)
    finally:
        os.close(file)
