"""Detect the failure of other ranks, and report this rank's own, through the job's store.

A rank that fails leaves a report in the store and waits a moment. A thread of every other rank
reads it before the lost connection makes a collective there fail. The thread also publishes the
heartbeat (see :mod:`.heartbeat`), looks at one neighbour's, and says once a minute where all ranks
are if this one does not go on. There is no other way to tell that a rank is late.
"""

import json
import logging
import os
import re
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from torch import distributed as torch_dist

from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.environments.torchrun import AGENT
from mmdevplug.errors import RankFailedError, first_line
from mmdevplug.utils.signals import start_thread
from mmdevplug.utils.torch_compat import get_text, set_text

from .abort import GONE, abort, forget_note, note_for_agent, say
from .heartbeat import (
    BEAT_SECONDS,
    ENDED,
    FAILED,
    LOST,
    LOST_SECONDS,
    PHASE_SECONDS,
    RUNNING,
    SILENT_SECONDS,
    STOPPED,
    Heartbeat,
    describe_places,
    list_numbers,
)
from .host_events import HostEvents
from .stack_place import describe_error
from .stop_together import StopAgreement

#: How long a failing rank waits for the others to read its report, and they for it to appear.
GRACE_SECONDS = 5.0
#: How long the main thread may go on after another rank's failure is known.
STOP_SECONDS = 15.0
#: Nobody waits longer than a minute without a line.
REPORT_SECONDS = 55.0
_TICK = 0.5
#: At most this many ranks investigate a lost connection at once; the others wait for their report.
_MAX_INVESTIGATORS = 16
#: The part in which messages of ranks about the same error differ.
_RANK = re.compile(r'\brank \d+')

_KILLED = (
    f'{GONE}. It was killed (out of memory, SIGKILL) or its host is down; look at the end of its '
    f'log and at the kernel log of its host'
)
_IS_STOPPED = (
    'the process is stopped (SIGSTOP, a debugger, a frozen container); let it go on with '
    '`kill -CONT PID`, or end it'
)
_UNREACHABLE = (
    'its host or the link to it is down, or its process was killed or stopped; look at its log '
    'and at the kernel log of its host'
)


class Process:
    """The state of fault tolerance in this process; there is one, :data:`PROCESS`."""

    watch: 'Optional[FailureWatch]' = None  #: None in a single process.
    #: Above 0 inside parts of the program that all ranks run together, which may be nested.
    #: Elsewhere the silence of another rank is no failure.
    waiting = 0
    waiting_since = 0.0  #: In seconds of the monotonic clock.


PROCESS = Process()


class FailureWatch:
    """Publish this rank's heartbeat, and look for the failures of other ranks.

    One thread does it. A second one, which never asks the store, ends the process where the first
    or the main thread hangs: ``add()`` of a store that is gone does not return (PyTorch 2.13,
    whatever its timeout). The main thread uses ``main_store``; ``watch_store`` is a second
    connection to it.
    """

    def __init__(
        self, main_store: 'torch_dist.Store', watch_store: 'torch_dist.Store', env: LaunchEnv
    ) -> None:
        self.main_store, self.watch_store, self.env = main_store, watch_store, env
        self.heartbeat = Heartbeat(watch_store, env, 2 * _TICK)
        # One store serves all ranks.
        self._pause = min(BEAT_SECONDS, max(_TICK, env.world_size / 512))
        self.events = HostEvents(watch_store, self.heartbeat.process_table, self._pause)
        self.before_abort: List[Callable[[], object]] = []
        self._neighbour = (env.rank + 1) % env.world_size
        self.others = [*range(env.rank), *range(env.rank + 1, env.world_size)]
        self._reported = threading.Event()
        self._report: Dict[str, Any] = {}
        self._report_at = 0.0
        self._asked: Optional[float] = None  # since when the store owes an answer
        self._line_at = 0.0  # when a line last said what this rank waits for
        self.ending = False  # the main thread ends because of an error
        self.attempt = 0  # failures of this job that this rank has survived
        self._attempt_lock = threading.Lock()
        self._store_error: Optional[str] = None
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._trainings = 0  # number of trainings that have begun
        self._stop: Optional[StopAgreement] = None  # of the last training
        self._reread = False  # a training has just begun: read what other ranks asked in it
        self._beating = start_thread(self._beat, 'mmdevplug-beat')
        self._guarding = start_thread(self._guard, 'mmdevplug-guard')

    def stop(self) -> None:
        """End the threads before the interpreter does, which would not wait for them."""
        self._stopped.set()
        self._wake.set()
        self._beating.join(timeout=GRACE_SECONDS)
        self._guarding.join(timeout=GRACE_SECONDS)

    # the thread that beats ----------------------------------------------------------------------

    def _beat(self) -> None:
        next_beat, events = 0.0, 0
        try:
            self.events.begin()
            while not self._stopped.is_set():
                self._asked = self.heartbeat.now
                now = time.monotonic()
                new_phase = self.heartbeat.published is not self.heartbeat.phase
                early = new_phase and now >= next_beat - BEAT_SECONDS + PHASE_SECONDS
                if now >= next_beat or early or self._wake.is_set():
                    next_beat = now + BEAT_SECONDS
                    self._wake.clear()
                    self.heartbeat.publish()
                    self._look_at_neighbour()
                    if self.env.rank and 0 not in self.heartbeat.seen:
                        self.heartbeat.read(0)  # for the message if the store is lost
                self._report_long_wait()
                if self._stop is not None:
                    self._stop.publish()
                found = self.events.count()
                if found != events or self._reread:
                    events, self._reread = found, False
                    self._read_events()
                self._asked = None
                self._wake.wait(self._pause)
            if self.heartbeat.state == RUNNING:
                self.heartbeat.state = ENDED
            self.heartbeat.publish()
        except RuntimeError as error:
            # The store ended with its rank; the main thread gets an error by itself.
            self._store_error = str(error)
            logging.getLogger(__name__).debug('the store is gone: %s', error)

    def _look_at_neighbour(self) -> None:
        """Report a neighbour that is gone or stopped, or is silent on another host."""
        rank, seen = self._neighbour, self.heartbeat.read(self._neighbour)
        if seen is None or seen.state == ENDED or not PROCESS.waiting:
            return
        silence, why = self.heartbeat.silence(rank), ''
        if self._reported.is_set() or silence < SILENT_SECONDS:
            return
        if self.heartbeat.find_dead([rank]):
            why = _KILLED
        elif silence > seen.patience:
            # One that runs on this host computes: one call there may hold the interpreter.
            state = self.heartbeat.process_state(rank)
            why = {'': _UNREACHABLE, STOPPED: _IS_STOPPED}.get(state, '')
        if why:
            self.report_ranks([rank], f'no sign of life for {silence:.0f} s: {why}')

    def _report_long_wait(self) -> None:
        """Say once a minute where all ranks are, if this one has not gone on for so long."""
        if not PROCESS.waiting or self._reported.is_set() or self.ending:
            return
        now = time.monotonic()
        waited = now - max(self.heartbeat.phase[1], PROCESS.waiting_since)
        if min(waited, now - self._line_at) < REPORT_SECONDS:
            return
        self._line_at = now
        # One rank is enough.
        if self.watch_store.add(f'long_waits/{int(time.time() // REPORT_SECONDS)}', 1) == 1:
            places = self.heartbeat.places(range(self.env.world_size))
            say(f'Nothing has gone on for {waited:.0f} s: {describe_places(places)}.')

    def _read_events(self) -> None:
        attempt = self.attempt
        if not self._reported.is_set() and self.watch_store.add(f'failure/{attempt}/there', 0):
            report = json.loads(get_text(self.watch_store, f'failure/{attempt}/report'))
            with self._attempt_lock:
                if attempt != self.attempt:
                    return  # The main thread found the failure by itself and went on.
                self._report = report
                self._report_at = self.heartbeat.now
                self._reported.set()
            self.watch_store.add(f'failure/{attempt}/seen', 1)
        if self._stop is not None:
            self._stop.read()

    # the thread that watches the clock ----------------------------------------------------------

    def _guard(self) -> None:
        calm = 0.0  # outside of what all ranks do together silence is no failure
        while not self._stopped.wait(_TICK):
            now, asked = self.heartbeat.tick(), self._asked
            if not PROCESS.waiting:
                calm = now
            elif self._reported.is_set() and not self.ending:
                if now - max(calm, self._report_at) > STOP_SECONDS:
                    abort(str(self._stops_because(self._report['text'])), self.before_abort)
            elif asked is not None and now - max(calm, asked) > LOST_SECONDS:
                lost = self.store_lost(self._store_error or 'it does not answer', now - asked)
                abort(str(lost), self.before_abort)

    # what the main thread asks ------------------------------------------------------------------

    def report(self, text: str, readers: int, own: bool = False) -> bool:
        """Write a report and wait a moment until as many ranks as ``readers`` have read it.

        Returns False if another rank has reported before.
        """
        key = f'failure/{self.attempt}'
        if self.watch_store.add(f'{key}/count', 1) > 1:
            return False
        report = dict(by=self.env.rank, own=own, host=self.heartbeat.host, text=text[:4000])
        set_text(self.watch_store, f'{key}/report', json.dumps(report))
        self.watch_store.add(f'{key}/there', 1)
        self.events.add()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and threading.current_thread() is not self._beating:
            if self.watch_store.add(f'{key}/seen', 0) >= readers:
                break
            time.sleep(_TICK / 5)
        return True

    def report_error(self, error: Exception, stage: str) -> None:
        """Report this rank's own error to the others."""
        self._set_state(FAILED)
        # A rank that has read the report may end at once, and torchrun then ends this one.
        note_for_agent(error)
        text = f'{self.env.describe()} failed in {stage}: {type(error).__name__}: {error}'
        try:
            if not self.report(text, self.env.world_size, True):
                found = self.peer_failure(wait=2 * _TICK)
                if found is not None and _RANK.sub('', str(error))[:1000] in _RANK.sub(
                    '', str(found)
                ):
                    error.brief = found.brief  # type: ignore[attr-defined]
        except RuntimeError:
            # The error itself is about to be raised.
            print(f'{self.env.describe()} cannot reach the store.', file=sys.stderr)

    def report_ranks(self, ranks: List[int], of: str, alive: bool = False) -> RankFailedError:
        """Report ranks that cannot report themselves, and return what to raise on this rank."""
        readers = self.env.world_size - (0 if alive else len(ranks))
        return self._report_text(f'{self.heartbeat.describe_all(ranks)}: {of}', readers)

    def _report_text(self, text: str, readers: int) -> RankFailedError:
        if self.report(text, readers) or threading.current_thread() is self._beating:
            return self._stops_because(text)
        # Another rank has reported the same, and one long message is enough.
        return self.peer_failure(wait=GRACE_SECONDS) or self._stops_because(text)

    def peer_failure(self, wait: float = 0.0) -> Optional[RankFailedError]:
        """The report of another rank, waiting ``wait`` seconds for it; None if there is none."""
        self._reported.wait(wait)
        report = self._report
        mine = bool(report) and report['by'] == self.env.rank
        if not report or (mine and report['own']):
            return None
        error = self._stops_because(report['text'])
        if not mine and report['host'] == self.heartbeat.host:
            # Ranks of one host mostly share a terminal; one long message is enough.
            error.brief = f'{self.env.describe()} stops too; see rank {report["by"]}.'
        return error

    def _stops_because(self, text: str) -> RankFailedError:
        return RankFailedError(f'{self.env.describe()} stops because of {text}')

    def store_lost(self, error: object, silence: float = 0.0) -> RankFailedError:
        """The error to raise when the store does not answer any more."""
        found = self.peer_failure()
        if found is not None:
            return found
        waited = f' for {silence:.0f} s' if silence >= 1 else ''
        place = f'{self.env.master_addr}:{self.env.master_port}'
        lost = f'the store at {place}, which has not answered{waited} ({first_line(error)})'
        # Of others this rank has read the first beat alone, not where they are now.
        beats = self.heartbeat
        holder = beats.describe(0) if self._neighbour == 0 else beats.name(0)
        if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
            pid = os.environ.get(AGENT) if self.env.single_host else None
            which = f'(pid {pid})' if pid else 'of the host of rank 0'
            holder = f'the command that started the ranks {which}'
        elif self.env.rank == 0:
            return RankFailedError(
                f'{self.env.describe()} stops: it holds {lost}. Its threads get no processor '
                f'time: start fewer processes on this host.'
            )
        return self._stops_because(f'{holder}: it holds {lost}. {_UNREACHABLE.capitalize()}.')

    def begin_attempt(self) -> None:
        """Forget the last failure: the process goes on after it.

        A failure ends the attempts of all ranks, so all of them count the same number, and a late
        report of the last attempt is not read in the next one.
        """
        with self._attempt_lock:
            self.attempt += 1
            self._report = {}
            self._reported.clear()
        forget_note()
        self._reread = True
        self.heartbeat.state, self.heartbeat.lost_at = RUNNING, ''
        self.ending = False
        self._wake.set()

    def end(self) -> None:
        """Mark the main thread as exiting, so the watch does not abort it."""
        self._set_state(LOST)

    def _set_state(self, state: str) -> None:
        self.ending = True
        self.heartbeat.state = state
        self._wake.set()

    def explain(self, error: Exception) -> RankFailedError:
        """Find out why a connection was lost."""
        try:
            return self._find_culprit(error)
        except RuntimeError as lost:
            return self.store_lost(lost)

    def _find_culprit(self, error: Exception) -> RankFailedError:
        self.heartbeat.lost_at = describe_error(error)
        self._set_state(LOST)
        if self.watch_store.add(f'failure/{self.attempt}/lost', 1) > _MAX_INVESTIGATORS:
            self._reported.wait(2 * SILENT_SECONDS)
        found = self.peer_failure(wait=_TICK)
        if found is not None:
            return found
        gone = self.heartbeat.find_dead(self.others)
        if gone:
            return self.report_ranks(gone, _KILLED)
        silent = self._find_silent()
        found = self.peer_failure()
        if found is not None:
            return found
        if silent:
            stopped = self.heartbeat.process_state(silent[0]) == STOPPED
            return self.report_ranks(silent, _IS_STOPPED if stopped else _UNREACHABLE)
        places = self.heartbeat.places([self.env.rank, *self.others])
        state = {rank: seen.state for rank, seen in self.heartbeat.seen.items()}
        ended = [rank for rank in self.others if state.get(rank) == ENDED]
        if ended:
            here = describe_places(places[:1])
            return self.report_ranks(ended, f'it ended while the others went on: {here}')
        if len(places) == 1:
            return RankFailedError(
                f'{self.env.describe()} lost the connection to another rank, which left no '
                f'message: {first_line(error)}. All ranks are alive and in the same place, '
                f'{places[0][1]}: the network loses messages, a rank came later than '
                f'env_cfg.dist_cfg.timeout, or ranks passed tensors of different sizes. Look at '
                f"the end of the other ranks' logs and at the kernel log."
            )
        # Ranks wait for each other in different places; the first is this rank's.
        elsewhere = sorted(rank for ranks, _ in places[1:] for rank in ranks)
        late = [rank for rank in elsewhere if state.get(rank) == RUNNING]
        named = (
            self.heartbeat.describe_all(late) if late else 'ranks that wait in different places'
        )
        apart = [place for place in places if not set(place[0]) <= set(late)]
        return self._report_text(
            f'{named}: {describe_places(apart)}. {list_numbers(places[0][0]).capitalize()} waited '
            f'for {list_numbers(late or elsewhere)} longer than env_cfg.dist_cfg.timeout, or lost '
            f'the connection; all processes are alive. All ranks have to come to the same '
            f'collectives (averages of gradients, synchronized batch normalization, '
            f'gather_samples, ...) in the same order: look for a branch that depends on the data '
            f'or on the rank, and for ranks with fewer batches',
            self.env.world_size,
        )

    def _find_silent(self) -> List[int]:
        """The ranks that have not beaten for two or three intervals, and do not compute here."""
        for rank in self.others:
            self.heartbeat.read(rank)
        self._stopped.wait(SILENT_SECONDS)
        enough = SILENT_SECONDS - 2 * _TICK
        return [
            rank
            for rank in self.others
            for seen in [self.heartbeat.read(rank)]
            if seen
            and seen.state == RUNNING
            and self.heartbeat.silence(rank) >= enough
            and self.heartbeat.process_state(rank) in ('', STOPPED)
        ]

    def begin_training(self, stop: StopAgreement) -> None:
        """Read and write requests for this training to stop from now on."""
        self._trainings += 1
        stop.keys = f'stop/{self._trainings}'
        self._stop = stop
        # Another rank may have asked before this one began.
        self._reread = True
        self._wake.set()
