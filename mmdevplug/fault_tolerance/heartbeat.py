"""Publish what each rank does in the store, as a sign of life.

Every rank writes a key of its own every two seconds. Others read it when somebody must be named,
and one neighbour reads it all the time.
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
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

from mmdevplug.environments.launch import LaunchEnv

BEAT_SECONDS = 2.0
#: So many seconds without a beat that a rank is taken for gone, where a connection was lost too.
SILENT_SECONDS = 2.5 * BEAT_SECONDS
#: So many ranks are described in one message.
DESCRIBED = 8

#: States of a rank.
RUNNING, LOST, FAILED, ENDED = 'running', 'lost', 'failed', 'ended'


class Phase(NamedTuple):
    """What a rank does.

    Attributes:
        text (str): For people.
        progress (int): How many phases this rank has entered.
        began (float): In seconds of the monotonic clock.
    """

    text: str
    progress: int
    began: float


_phase = Phase('set-up', 0, time.monotonic())


def enter_phase(text: str) -> None:
    """Note what this rank does from now on; costs less than a microsecond.

    Args:
        text (str): E.g. ``'data preparation'``; the others name it if this rank is late or gone.

    Examples:
        >>> enter_phase('saving a checkpoint')
    """
    global _phase
    _phase = Phase(text, _phase.progress + 1, time.monotonic())


def current_phase() -> Phase:
    """What this rank does now."""
    return _phase


class Beat(NamedTuple):
    """A sign of life.

    Attributes:
        count (int): Of beats.
        state (str): One of :data:`RUNNING`, :data:`LOST`, :data:`FAILED`, :data:`ENDED`.
        phase (str): See :class:`Phase`.
        progress (int): See :class:`Phase`.
        seconds (float): For how long it has been in this phase.
        host (str): Name of the host.
        pid (int): The process.
        place (str): Which table of processes the number is from.
        at (str): Where in the code the main thread is.
    """

    count: int
    state: str
    phase: str
    progress: int
    seconds: float
    host: str
    pid: int
    place: str
    at: str


class Seen(NamedTuple):
    """The newest beat of another rank, and when it arrived, in seconds of :class:`AwakeClock`."""

    beat: Beat
    since: float


class AwakeClock:
    """Seconds during which this process was awake.

    While a job is suspended nobody beats, which must not look like a failure afterwards.
    """

    def __init__(self, longest_step: float) -> None:
        self._longest = longest_step
        self._last = time.monotonic()
        self.now = 0.0

    def tick(self) -> float:
        """Go on; called more often than every ``longest_step`` seconds by one thread."""
        now = time.monotonic()
        self.now += min(now - self._last, self._longest)
        self._last = now
        return self.now


class Heartbeat:
    """This rank's beats, and what is known of those of others.

    Args:
        store (torch.distributed.Store): A connection that nothing blocks.
        env (LaunchEnv): How this process was started.
        clock (AwakeClock): The clock of this process.
    """

    def __init__(self, store: Any, env: LaunchEnv, clock: AwakeClock) -> None:
        self._store, self._env, self._clock = store, env, clock
        self.state = RUNNING
        self._count = 0
        self._published: Optional[Phase] = None
        self.host, self._place = socket.gethostname(), _process_table()
        self.seen: Dict[int, Seen] = {}
        self._present = {env.rank}

    def publish(self) -> None:
        """Write this rank's beat."""
        self._count += 1
        phase = self._published = _phase
        beat = Beat(
            self._count,
            self.state,
            phase.text,
            phase.progress,
            round(time.monotonic() - phase.began, 1),
            self.host,
            os.getpid(),
            self._place,
            _where(threading.main_thread()),
        )
        self._store.set(f'beat/{self._env.rank}', json.dumps(beat))
        if self._count == 1:
            self._store.add(f'beats/{self._env.rank}', 1)

    def is_outdated(self) -> bool:
        """Whether this rank has entered a phase since it was last published."""
        return self._published is not _phase

    def read(self, rank: int) -> Optional[Seen]:
        """Look at a rank's beat; None if it has not made one yet."""
        if rank not in self._present:
            # `get` waits for a key that is not there yet.
            if not self._store.add(f'beats/{rank}', 0):
                return None
            self._present.add(rank)
        beat = Beat(*json.loads(self._store.get(f'beat/{rank}')))
        before = self.seen.get(rank)
        if before is None or before.beat.count != beat.count:
            self.seen[rank] = Seen(beat, self._clock.now)
        return self.seen[rank]

    def silence(self, rank: int) -> float:
        """For how many seconds nothing new has been seen of a rank that was looked at."""
        found = self.seen.get(rank)
        return 0.0 if found is None else self._clock.now - found.since

    def note_answer(self, rank: int) -> None:
        """Note that a rank that was looked at lives, though it does not beat."""
        self.seen[rank] = Seen(self.seen[rank].beat, self._clock.now)

    def is_gone(self, rank: int) -> bool:
        """Whether the process of a rank, as last seen, ran on this host and does no more."""
        found = self.seen.get(rank)
        if found is None or found.beat.place != self._place:
            return False
        return found.beat.state == RUNNING and not _runs(found.beat.pid)

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

    def describe_all(self, ranks: Iterable[int]) -> str:
        """Name some ranks, after looking at them."""
        ranks = list(ranks)
        for rank in ranks[:DESCRIBED]:
            self.read(rank)
        return list_ranks([self.describe(rank) for rank in ranks[:DESCRIBED]], len(ranks))


def list_ranks(described: List[str], count: int) -> str:
    """Join descriptions into part of a sentence, with a word on those that were left out."""
    more = count - len(described)
    return '; '.join(described) + (f'; and {more} more' if more > 0 else '')


def _process_table() -> str:
    """Names the table of processes that a process number is from, empty if it has no name."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        return f'{boot} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def _runs(pid: int) -> bool:
    try:
        # The name, in parentheses, may hold anything; the state follows it.
        state = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
    except OSError:
        return not Path('/proc/self/stat').exists()
    return state not in 'ZX'


_STANDARD = (sysconfig.get_paths()['stdlib'], sysconfig.get_paths()['platstdlib'])


def _where(thread: threading.Thread) -> str:
    """The line that a thread executes, the nearest outside PyTorch and the standard library."""
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
