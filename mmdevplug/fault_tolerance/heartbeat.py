"""Publish in the store that each rank is alive, and what it does.

Every rank writes its key every two seconds. One neighbour always reads it, others do when a
message names the rank.
"""

import json
import os
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Dict, List, NamedTuple, Optional

from mmdevplug.config.accelerator import LEAST_HEARTBEAT_TIMEOUT
from mmdevplug.environments.launch import LaunchEnv
from mmdevplug.utils.torch_compat import get_text, set_text

BEAT_SECONDS = LEAST_HEARTBEAT_TIMEOUT / 3
#: Heartbeat silence, in seconds, after which a rank counts as dead if a connection was lost too.
SILENT_SECONDS = 2.5 * BEAT_SECONDS
#: How many ranks one message describes.
DESCRIBED = 8

#: States of a rank.
RUNNING, LOST, FAILED, ENDED = 'running', 'lost', 'failed', 'ended'


class Phase(NamedTuple):
    """What a rank does."""

    text: str
    progress: int  # how many phases this rank has entered
    began: float  # in seconds of the monotonic clock


class Beat(NamedTuple):
    """One entry of a rank's heartbeat."""

    count: int  # number of beats, this one included
    state: str  # RUNNING, LOST, FAILED or ENDED
    phase: str
    progress: int
    seconds: float  # since the phase began
    host: str
    pid: int
    process_table: str  # what `pid` is a number of
    at: str  # the line of code that the main thread executes


class Seen(NamedTuple):
    """The newest beat of another rank, and when it arrived, in seconds of :class:`AwakeClock`."""

    beat: Beat
    since: float


class AwakeClock:
    """Count seconds in which this process ran: a suspended job must not look like a failure."""

    def __init__(self, longest_step: float) -> None:
        self._longest = longest_step
        self._last = time.monotonic()
        self.now = 0.0

    def tick(self) -> float:
        """Advance; one thread calls this more often than every ``longest_step`` seconds."""
        now = time.monotonic()
        self.now += min(now - self._last, self._longest)
        self._last = now
        return self.now


class Heartbeat:
    """Publish this rank's beats and read those of others, through a store that nothing blocks."""

    def __init__(self, store: Any, env: LaunchEnv, clock: AwakeClock) -> None:
        self._store, self._env, self._clock = store, env, clock
        self.state = RUNNING
        self._count = 0
        self._phase = Phase('set-up', 0, time.monotonic())
        self._published: Optional[Phase] = None
        self.host, self._process_table = socket.gethostname(), _process_table()
        self.seen: Dict[int, Seen] = {}
        self._present = {env.rank}

    def enter_phase(self, text: str) -> None:
        """Set what this rank does now."""
        self._phase = Phase(text, self._phase.progress + 1, time.monotonic())

    def publish(self) -> None:
        """Write this rank's beat."""
        self._count += 1
        phase = self._published = self._phase
        beat = Beat(
            self._count,
            self.state,
            phase.text,
            phase.progress,
            round(time.monotonic() - phase.began, 1),
            self.host,
            os.getpid(),
            self._process_table,
            _code_location(threading.main_thread()),
        )
        set_text(self._store, f'beat/{self._env.rank}', json.dumps(beat))
        if self._count == 1:
            self._store.add(f'beats/{self._env.rank}', 1)

    def is_outdated(self) -> bool:
        """Whether this rank has entered a phase since it was last published."""
        return self._published is not self._phase

    def read(self, rank: int) -> Optional[Seen]:
        """Read a rank's newest beat, None if there is none yet."""
        if rank not in self._present:
            # `get` would wait for a missing key.
            if not self._store.add(f'beats/{rank}', 0):
                return None
            self._present.add(rank)
        beat = Beat(*json.loads(get_text(self._store, f'beat/{rank}')))
        before = self.seen.get(rank)
        if before is None or before.beat.count != beat.count:
            self.seen[rank] = Seen(beat, self._clock.now)
        return self.seen[rank]

    def silence(self, rank: int) -> float:
        """Seconds since the newest beat of a rank that was read."""
        found = self.seen.get(rank)
        return 0.0 if found is None else self._clock.now - found.since

    def note_answer(self, rank: int) -> None:
        """Count an answer of a rank that was read as a beat."""
        self.seen[rank] = Seen(self.seen[rank].beat, self._clock.now)

    def is_gone(self, rank: int) -> bool:
        """Whether the process of a rank ran on this host and has ended without a word."""
        found = self.seen.get(rank)
        if found is None or found.beat.process_table != self._process_table:
            return False
        return found.beat.state == RUNNING and not _is_running(found.beat.pid)

    def describe(self, rank: int) -> str:
        """Name a rank, its host and its phase as last seen."""
        name = f'rank {rank} of {self._env.world_size}'
        found = self.seen.get(rank)
        if found is None:
            return f'{name} (which has not started)'
        beat, silence = found.beat, self.silence(rank)
        text = f'{name} on host {beat.host} (pid {beat.pid}), in {beat.phase!r}'
        if beat.seconds >= 1:
            text += f' for {beat.seconds:.0f} s'
        if beat.at and beat.state == RUNNING:
            text += f' at {beat.at}'
        if beat.state == ENDED:
            text += ', which has ended'
        elif silence >= SILENT_SECONDS:
            text += f', last seen {silence:.0f} s ago'
        return text

    def describe_all(self, ranks: List[int]) -> str:
        """Read the beats of some ranks and describe them."""
        for rank in ranks[:DESCRIBED]:
            self.read(rank)
        return list_ranks([self.describe(rank) for rank in ranks[:DESCRIBED]], len(ranks))


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


def _is_running(pid: int) -> bool:
    try:
        # The state follows the name, which is in parentheses and may contain any character.
        state = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except OSError:
        return not Path('/proc/self/stat').exists()
    return state not in 'ZX'


_STANDARD = (sysconfig.get_paths()['stdlib'], sysconfig.get_paths()['platstdlib'])


def _code_location(thread: threading.Thread) -> str:
    """The line that a thread executes; frames of PyTorch and the standard library are skipped."""
    innermost = frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and _is_foreign(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ''
    code = frame.f_code
    return f'{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}'


def _is_foreign(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if 'site-packages' in name:
        return f'site-packages{os.sep}torch' in name
    return name.startswith(_STANDARD) or name.startswith('<frozen')
