"""Anonymous files in memory, which other processes of a host open through ``/proc``.

They have no names, so nothing stays behind when a job is killed. ``/dev/shm`` is not used: it is
small in containers.
"""

import mmap
import os
from typing import NamedTuple


class MemoryFile(NamedTuple):
    """Where the processes of a host find the open file of one of them."""

    pid: int
    file: int  # its descriptor in that process
    inode: int

    def map(self, size: int) -> mmap.mmap:
        """Map the first ``size`` bytes, as another process may do, too.

        Raises:
            OSError: If the file cannot be opened, or the number is that of another process here.
        """
        file = os.open(f'/proc/{self.pid}/fd/{self.file}', os.O_RDWR)
        try:
            if os.fstat(file).st_ino != self.inode:
                raise OSError(f'process {self.pid} is another one in this PID namespace')
            return mmap.mmap(file, size)
        finally:
            os.close(file)


def make_memory_file(name: str, size: int) -> MemoryFile:
    """Make a file of ``size`` bytes; others can open it until its descriptor is closed.

    Raises:
        OSError: If there is not so much memory.
        AttributeError: If the system has no such files.
    """
    file = os.memfd_create(name)
    try:
        os.posix_fallocate(file, 0, size)  # now, while a lack of memory is still an error
        return MemoryFile(os.getpid(), file, os.fstat(file).st_ino)
    except OSError:
        os.close(file)
        raise
