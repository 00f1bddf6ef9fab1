"""Memory that the ranks of one host share.

The first rank of a host makes a file in memory, and the others open it: one for each rank would
take as many descriptors of each rank as there are ranks.
"""

import mmap
import os
import warnings
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

from mmdevplug.utils.memory_file import MemoryFile, make_memory_file

#: Gives every rank what each of them passes, of what JSON can write, in the order of ranks.
Gather = Callable[[object], List[object]]


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
    memory: memoryview
    whole: mmap.mmap  # of all ranks of the host
    offset: int  # of this part in it, in bytes

    def give_back(self, start: int) -> None:
        """Give the memory from ``start`` on back to the system; it reads as zeros.

        Raises:
            OSError: If the system cannot.
        """
        if hasattr(mmap, 'MADV_REMOVE'):
            length = len(self.memory) - start
            self.whole.madvise(mmap.MADV_REMOVE, self.offset + start, length)


def parts_of(whole: mmap.mmap, processes: Dict[int, int]) -> List[SharedPart]:
    """Cut memory into equal parts, one for each rank of a host; ``processes`` has their pids."""
    size, all_of_it = len(whole) // len(processes), memoryview(whole)
    return [
        SharedPart(rank, pid, all_of_it[place * size :][:size], whole, place * size)
        for place, (rank, pid) in enumerate(processes.items())
    ]


def share_memory(
    size: int, here: Sequence[int], gather: Gather, rank: int
) -> Optional[List[SharedPart]]:
    """Give each rank of a host memory that all ranks of this host, ``here``, can read and write.

    Returns that of each of them, or None on all ranks if any could not share. The size, in bytes,
    is the same on all ranks.
    """
    own: Optional[MemoryFile] = None
    error = None
    try:
        if rank == here[0]:
            own = make_memory_file('mmdevplug-gradients', size * len(here))
    except (OSError, AttributeError) as caught:
        error = f'{type(caught).__name__}: {caught} (asked for {size * len(here)} bytes)'[:500]
    files, processes, errors = zip(*gather([own, os.getpid(), error]))
    shared: List[SharedPart] = []
    if not any(errors):
        try:
            whole = MemoryFile(*files[here[0]]).map(size * len(here))
            shared = parts_of(whole, {each: processes[each] for each in here})
        except OSError as caught:
            error = f'{type(caught).__name__}: {caught}'[:500]
        # The file stays open until all ranks have opened it: this message waits.
        errors = tuple(gather(error))
    if own is not None:
        os.close(own.file)
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
