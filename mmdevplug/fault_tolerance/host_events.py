"""How many events the store counts, read once for all ranks of a host."""

import json
import time
from contextlib import suppress
from typing import List, Union

from torch import distributed as torch_dist

from mmdevplug.utils.memory_file import MemoryFile, make_memory_file
from mmdevplug.utils.torch_compat import get_text, read_counter, set_text

_SIZE = 16  # bytes: the number of events, and when it was read, in nanoseconds


class HostEvents:
    """Count the events of a job, such as a failure, in which each rank has to look at the store.

    The ranks of a host share two words of memory. Whoever finds them older than half a pause
    between two questions asks the store and writes the answer there, so that the store is asked
    by hosts, not by ranks. No rank is chosen for it: another one may end at any time.

    Args:
        store (Store): That of the job.
        process_table (str): Names the host and what its process numbers are unique in; if empty,
            this rank asks for itself alone.
        pause (float): Seconds between two questions of a rank.
    """

    def __init__(self, store: 'torch_dist.Store', process_table: str, pause: float) -> None:
        self._store, self._key = store, f'events/{process_table}'
        self._fresh_ns = int(pause / 2 * 1e9)
        self._joined = not process_table
        #: The number of events and when it was read; of this rank alone until it has joined.
        self._words: Union[List[int], memoryview[int]] = [0, 0]

    def begin(self) -> None:
        """Create the counter, and share memory if this rank is the first of its host."""
        self._store.add('events', 0)
        if self._joined or self._store.add(f'{self._key}/ranks', 1) > 1:
            return
        shared = None  # each rank of the host asks for itself
        with suppress(OSError, AttributeError):
            shared = make_memory_file('mmdevplug-events', _SIZE)
        set_text(self._store, f'{self._key}/memory', json.dumps(shared))
        self._store.add(f'{self._key}/there', 1)

    def count(self) -> int:
        """The events so far, as of half a pause ago or later."""
        self._join()
        counted, read_at = self._words
        now = time.monotonic_ns()
        if not read_at or not 0 <= now - read_at < self._fresh_ns:
            # Another rank may have read a later one meanwhile.
            counted = max(read_counter(self._store, 'events'), self._words[0])
            self._words[0], self._words[1] = counted, now
        return counted

    def add(self) -> None:
        """Count an event, and let the ranks of this host ask the store at once."""
        self._store.add('events', 1)
        self._words[1] = 0

    def _join(self) -> None:
        if self._joined or not self._store.add(f'{self._key}/there', 0):
            return
        self._joined = True
        shared = json.loads(get_text(self._store, f'{self._key}/memory'))
        if shared is not None:
            with suppress(OSError):  # the rank that made it has ended
                self._words = memoryview(MemoryFile(*shared).map(_SIZE)).cast('q')
