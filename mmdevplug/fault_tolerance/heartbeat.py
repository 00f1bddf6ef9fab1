"""Publish in the store that each rank is alive, and what it does.

Every rank writes its key every two seconds, or every second while it goes from phase to phase. One
neighbour always reads it, others do when a message names the rank.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from torch import distributed as torch_dist

from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.utils.host import GONE_STATES, process_state
from mmdevplug.utils.torch_compat import get_text, set_text

from .stack_place import describe_stack

BEAT_SECONDS = 2.0
#: A beat is earlier, but not by more than this allows, if a rank has come to another phase.
PHASE_SECONDS = 1.0
#: Heartbeat silence, in seconds, after which a rank counts as dead if a connection was lost too.
SILENT_SECONDS = 2.5 * BEAT_SECONDS
#: And by itself, if nobody can look at its process: it is on another host.
LOST_SECONDS = 60.0
#: The same on a lazy device, whose compiler may hold the interpreter's lock for minutes.
COMPILING_SECONDS = 600.0
#: After this long in a phase, in seconds, a beat says which collective and layer a rank is in.
DETAILED_SECONDS = 2.0 * BEAT_SECONDS
#: How many ranks one message describes.
DESCRIBED = 8

#: States of a rank.
RUNNING, LOST, FAILED, ENDED = 'running', 'lost', 'failed', 'ended'
#: The state of a process that SIGSTOP or a terminal has stopped.
STOPPED = 'T'


class Beat(NamedTuple):
    """One entry of a rank's heartbeat."""

    # Number of beats, this one included. It hides a method of tuples that nobody calls.
    count: int  # type: ignore[assignment]
    state: str  # RUNNING, LOST, FAILED or ENDED
    phase: str
    seconds: float  # since the phase began
    host: str
    pid: int
    process_table: str  # what `pid` is a number of
    at: str  # where the main thread is, or was when it lost a connection
    patience: float  # how long the rank may be silent
    since: float = 0.0  # when it arrived here, in seconds of :attr:`Heartbeat.now`


class Heartbeat:
    """Publish this rank's beats and read those of others, through a store that nothing blocks."""

    def __init__(self, store: 'torch_dist.Store', env: LaunchEnv, longest_step: float) -> None:
        self._store, self._env, self._longest_step = store, env, longest_step
        self._last = time.monotonic()
        #: Seconds in which this process ran: a suspended job must not look like a failure.
        self.now = 0.0
        self.state = RUNNING
        self.lost_at = ''  # where the main thread lost a connection, if it did
        self.patience = LOST_SECONDS
        #: What this rank does, and since when, in seconds of the monotonic clock.
        self.phase = ('set-up', time.monotonic())
        #: The phase of the last beat.
        self.published: Optional[Tuple[str, float]] = None
        self._count = 0
        self.host, self.process_table = socket.gethostname(), _process_table()
        #: The newest beats that were read, by rank.
        self.seen: Dict[int, Beat] = {}
        self._present = {env.rank}

    def enter_phase(self, text: str) -> None:
        """Set what this rank does now."""
        self.phase = (text, time.monotonic())

    def tick(self) -> float:
        """Advance the clock; one thread calls this more often than its longest step."""
        now = time.monotonic()
        self.now += min(now - self._last, self._longest_step)
        self._last = now
        return self.now

    def publish(self) -> None:
        """Write this rank's beat."""
        self._count += 1
        self.published = self.phase
        phase, began = self.published
        seconds = time.monotonic() - began
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = list(traceback.walk_stack(main)) if main is not None else []
        beat = Beat(
            self._count,
            self.state,
            phase,
            round(seconds, 1),
            self.host,
            os.getpid(),
            self.process_table,
            self.lost_at or describe_stack(stack, seconds >= DETAILED_SECONDS),
            self.patience,
        )
        set_text(self._store, f'beat/{self._env.rank}', json.dumps(beat))
        if self._count == 1:
            self._store.add(f'beats/{self._env.rank}', 1)

    def read(self, rank: int) -> Optional[Beat]:
        """Read a rank's newest beat, None if there is none yet."""
        if rank not in self._present:
            # `get` would wait for a missing key.
            if not self._store.add(f'beats/{rank}', 0):
                return None
            self._present.add(rank)
        beat = Beat(*json.loads(get_text(self._store, f'beat/{rank}')))
        before = self.seen.get(rank)
        if before is None or before.count != beat.count:
            self.seen[rank] = beat._replace(since=self.now)
        return self.seen[rank]

    def silence(self, rank: int) -> float:
        """Seconds since the newest beat of a rank that was read."""
        found = self.seen.get(rank)
        return 0.0 if found is None else self.now - found.since

    def find_dead(self, ranks: Iterable[int]) -> List[int]:
        """The ranks whose processes were on this host and have ended without a message."""
        for rank in ranks:
            self.read(rank)
        ended = [rank for rank in ranks if self.process_state(rank) in GONE_STATES]
        # Their last beat: a process that ends in order says so before.
        return [
            rank for rank in ended for last in [self.read(rank)] if last and last.state == RUNNING
        ]

    def process_state(self, rank: int) -> str:
        """The state of a rank's process, as in ``/proc``; '' if it is on another host."""
        found = self.seen.get(rank)
        if found is None or found.process_table != self.process_table:
            return ''
        return process_state(found.pid)

    def describe(self, rank: int) -> str:
        """Name a rank, its host and what it does, as last seen."""
        name = self.name(rank)
        return f'{name}, {self._doing(rank)}' if rank in self.seen else name

    def name(self, rank: int) -> str:
        """Name a rank, its host and its process, if it has been seen."""
        name, found = f'rank {rank} of {self._env.world_size}', self.seen.get(rank)
        if found is None:
            return f'{name} (which has not started)'
        return f'{name} on host {found.host} (pid {found.pid})'

    def _doing(self, rank: int) -> str:
        beat, silence = self.seen.get(rank), self.silence(rank)
        if beat is None:
            return 'not started'
        text = f'in {beat.phase!r}'
        if beat.at and beat.state in (RUNNING, LOST):
            text += f' at {beat.at}'
        if beat.state == ENDED:
            return f'{text}, ended'
        if self.process_state(rank) == STOPPED:
            text += ', its process is stopped'
        if rank != self._env.rank and silence >= SILENT_SECONDS:
            text += f', last seen {silence:.0f} s ago'
        return text

    def describe_all(self, ranks: List[int]) -> str:
        """Read the beats of some ranks and describe them."""
        for rank in ranks[:DESCRIBED]:
            self.read(rank)
        return list_ranks([self.describe(rank) for rank in ranks[:DESCRIBED]], len(ranks))

    def places(self, ranks: Iterable[int]) -> List[Tuple[List[int], str]]:
        """Read the beats of ranks, and group those that do the same in the same place."""
        found: Dict[str, List[int]] = {}
        for rank in ranks:
            self.read(rank)
            found.setdefault(self._doing(rank), []).append(rank)
        return [(members, doing) for doing, members in found.items()]


def describe_places(places: List[Tuple[List[int], str]]) -> str:
    """Say which ranks are in which place, the first places only."""
    named = [f'{list_numbers(ranks)} {place}' for ranks, place in places[:DESCRIBED]]
    return list_ranks(named, len(places))


def list_numbers(ranks: List[int]) -> str:
    """Name ranks by their numbers.

    Examples:
        >>> list_numbers([1]), list_numbers([0, 2, 3, 4])
        ('rank 1', 'ranks 0, 2-4')
    """
    spans: List[List[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(a) if a == b else f'{a}-{b}' if b > a + 1 else f'{a}, {b}' for a, b in spans]
    return f'rank{"" if len(ranks) == 1 else "s"} {", ".join(words)}'


def list_ranks(described: List[str], count: int) -> str:
    """Join descriptions of ranks; the rest of ``count`` ranks is only counted."""
    more = count - len(described)
    return '; '.join(described) + (f'; and {more} more' if more > 0 else '')


def _process_table() -> str:
    """Name the host and namespace that process numbers are unique in, empty if unknown."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        return f'{boot} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''
