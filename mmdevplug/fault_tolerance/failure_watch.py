"""Detect the failure of other ranks, and report this rank's own, through the job's store.

A rank that fails leaves a report in the store and waits a moment. A thread of every other rank
reads it before the lost connection makes a collective there fail. The thread also publishes the
heartbeat (see :mod:`.heartbeat`); one neighbour detects its silence.
"""

import json
import logging
import os
import re
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from torch import distributed as torch_dist

from mmdevplug.accelerators.backend import network_hint
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.environments.torchrun import AGENT
from mmdevplug.errors import DevPlugError, RankFailedError, first_line
from mmdevplug.utils.torch_compat import get_text, set_text

from .abort import abort, forget_note, note_for_agent, say
from .answer_port import ANSWER_SECONDS, GONE, LivenessCheck
from .code_location import locate_error
from .heartbeat import (
    BEAT_SECONDS,
    ENDED,
    FAILED,
    LOST,
    RUNNING,
    SILENT_SECONDS,
    AwakeClock,
    Heartbeat,
    describe_places,
    list_numbers,
)
from .long_waits import REPORT_SECONDS
from .stop_together import StopRequests

#: How long a failing rank waits for the others to read its report, and they for it to appear.
GRACE_SECONDS = 5.0
#: How long the main thread may go on after another rank's failure is known.
STOP_SECONDS = 15.0
_TICK = 0.5
#: At most this many ranks investigate a lost connection at once; the others wait for their report.
_MAX_INVESTIGATORS = 16

_RANK = re.compile(r'\brank \d+')


class FailureWatch:
    """Publish this rank's heartbeat, and look for the failures of other ranks, in two threads.

    The main thread uses ``main_store``; ``watch_store`` is a second connection to it. A rank
    counts as dead after ``heartbeat_timeout`` seconds of silence.
    """

    #: Above 0 inside parts of the program that all ranks run together, which may be nested.
    #: Elsewhere the silence of another rank is no failure.
    waiting = 0
    waiting_since = 0.0  # in seconds of the monotonic clock

    def __init__(
        self,
        main_store: 'torch_dist.Store',
        watch_store: 'torch_dist.Store',
        env: LaunchEnv,
        heartbeat_timeout: float,
    ) -> None:
        self.main_store, self.watch_store, self.env = main_store, watch_store, env
        self.heartbeat_timeout = heartbeat_timeout
        self._clock = AwakeClock(2 * _TICK)
        self._liveness = LivenessCheck(watch_store, env)
        self.heartbeat = Heartbeat(watch_store, env, self._clock)
        self._neighbour = (env.rank + 1) % env.world_size
        self._reported = threading.Event()
        self._report: Dict[str, Any] = {}
        self._report_at = 0.0
        self._answered = 0.0
        self.ending = False  # the main thread ends because of an error
        self.attempt = 0  # failures of this job that this rank has survived
        self._attempt_lock = threading.Lock()
        self._store_error: Optional[str] = None
        self.reported_at = 0.0  # when a line last said what this rank waits for
        self._stopped, self._wake = threading.Event(), threading.Event()
        self.stop_requests = StopRequests(watch_store)
        self._reread = False  # a round of stop requests has just begun: read its requests
        self._beating = threading.Thread(target=self._beat, name='mmdevplug-beat', daemon=True)
        self._guarding = threading.Thread(target=self._guard, name='mmdevplug-guard', daemon=True)
        self._beating.start()
        self._guarding.start()

    def stop(self) -> None:
        """End the threads before the interpreter does, which would not wait for them."""
        self._stopped.set()
        self._wake.set()
        self._beating.join(timeout=GRACE_SECONDS)
        self._guarding.join(timeout=GRACE_SECONDS)

    # the thread that beats ----------------------------------------------------------------------

    def _beat(self) -> None:
        # One store serves all ranks.
        pause = min(BEAT_SECONDS, max(_TICK, self.env.world_size / 512))
        next_beat, beats, events = 0.0, 0, 0
        try:
            while not self._stopped.is_set():
                due = time.monotonic() >= next_beat or self._wake.is_set()
                if due or self.heartbeat.is_outdated():
                    next_beat = time.monotonic() + BEAT_SECONDS
                    self._wake.clear()
                    self.heartbeat.publish()
                    self._look_at_others(beats)
                    beats += 1
                self._report_long_wait()
                self.stop_requests.publish()
                found = self.watch_store.add('events', 0)
                if found != events or self._reread:
                    events, self._reread = found, False
                    self._read_events()
                self._answered = self._clock.now
                self._wake.wait(pause)
            if self.heartbeat.state == RUNNING:
                self.heartbeat.state = ENDED
            self.heartbeat.publish()
        except RuntimeError as error:
            # The store ended with its rank; the main thread gets an error by itself.
            self._store_error = str(error)
            logging.getLogger(__name__).debug('the store is gone: %s', error)

    def _look_at_others(self, beats: int) -> None:
        """Read the beat of one neighbour always, and sometimes that of rank 0."""
        self.heartbeat.read(self._neighbour)
        if self.env.rank and beats % max(1, self.env.world_size // 64) == 0:
            self.heartbeat.read(0)
        seen = self.heartbeat.seen.get(self._neighbour)
        silence = self.heartbeat.silence(self._neighbour)
        if seen is None or seen.beat.state == ENDED or not self.waiting or self._reported.is_set():
            return
        if silence > self.heartbeat_timeout:
            silent = self.find_silent(self._others())
            if self._neighbour in silent:
                self.report_ranks(
                    silent,
                    f'no sign of life for {silence:.0f} s (accelerator.heartbeat_timeout='
                    f'{self.heartbeat_timeout:g}): {self._why_silent(self._neighbour)}',
                )

    def _report_long_wait(self) -> None:
        """Say once a minute where all ranks are, if this one has not gone on for so long."""
        if not self.waiting or self._reported.is_set() or self.ending:
            return
        waited = time.monotonic() - max(self.heartbeat.phase_began, self.waiting_since)
        since = time.monotonic() - self.reported_at
        if min(waited, since) < REPORT_SECONDS:
            return
        self.reported_at = time.monotonic()
        # One rank is enough.
        if self.watch_store.add(f'long_waits/{int(time.time() // REPORT_SECONDS)}', 1) == 1:
            places = self.heartbeat.places(range(self.env.world_size))
            say(f'No rank has gone on for {waited:.0f} s: {describe_places(places)}.')

    def _others(self) -> List[int]:
        return [rank for rank in range(self.env.world_size) if rank != self.env.rank]

    def _read_events(self) -> None:
        attempt = self.attempt
        if not self._reported.is_set() and self.watch_store.add(f'failure/{attempt}/there', 0):
            report = json.loads(get_text(self.watch_store, f'failure/{attempt}/report'))
            with self._attempt_lock:
                if attempt != self.attempt:
                    return  # The main thread found the failure by itself and went on.
                self._report = report
                self._report_at = self._clock.now
                self._reported.set()
            self.watch_store.add(f'failure/{attempt}/seen', 1)
        self.stop_requests.read()

    # the thread that watches the clock ----------------------------------------------------------

    def _guard(self) -> None:
        while not self._stopped.wait(_TICK):
            now = self._clock.tick()
            if not self.waiting:
                # Silence outside of what all ranks do together is no failure.
                self._answered = max(self._answered, now - _TICK)
                self._report_at = max(self._report_at, now)
                continue
            silence = now - self._answered
            if self._reported.is_set() and not self.ending:
                if now - self._report_at > STOP_SECONDS:
                    abort(str(self._stops_because(self._report['text'])))
            elif silence > self.heartbeat_timeout:
                abort(str(self.store_lost(self._store_error or 'it does not answer', silence)))

    # what the main thread asks ------------------------------------------------------------------

    def report(self, text: str, readers: int) -> bool:
        """Write a report and wait a moment until as many ranks as ``readers`` have read it.

        Returns False if another rank has reported before.
        """
        key = f'failure/{self.attempt}'
        if self.watch_store.add(f'{key}/count', 1) > 1:
            return False
        report = {'by': self.env.rank, 'host': self.heartbeat.host, 'text': text[:4000]}
        set_text(self.watch_store, f'{key}/report', json.dumps(report))
        self.watch_store.add(f'{key}/there', 1)
        self.watch_store.add('events', 1)
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
            if not self.report(text, self.env.world_size) and isinstance(error, DevPlugError):
                self._shorten(error)
        except RuntimeError:
            # The error itself is about to be raised.
            print(f'{self.env.describe()} cannot reach the store.', file=sys.stderr)

    def _shorten(self, error: DevPlugError) -> None:
        """Shorten the message if another rank of this host already logged the error."""
        found = self.peer_failure(wait=2 * _TICK)
        message = _RANK.sub('', str(error))[:1000]
        if found is not None and message in _RANK.sub('', str(found)):
            error.brief = found.brief  # type: ignore[attr-defined]

    def report_ranks(self, ranks: List[int], of: str, alive: bool = False) -> RankFailedError:
        """Report ranks that cannot report themselves, and return what to raise on this rank."""
        text = f'{self.heartbeat.describe_all(ranks)}: {of}'
        if self.report(text, self.env.world_size - (0 if alive else len(ranks))):
            return self._stops_because(text)
        # Another rank has reported the same, and one long message is enough.
        beats = threading.current_thread() is self._beating
        if beats:
            self._read_events()
        return self.peer_failure(wait=0 if beats else GRACE_SECONDS) or self._stops_because(text)

    def find_silent(self, ranks: List[int]) -> List[int]:
        """The ranks that have not beaten for two or three intervals and do not answer either."""
        for rank in ranks:
            self.heartbeat.read(rank)
        self._leave_store(SILENT_SECONDS)
        self._stopped.wait(SILENT_SECONDS)
        seen = {rank: self.heartbeat.read(rank) for rank in ranks}
        enough = SILENT_SECONDS - 2 * _TICK
        silent = [
            rank
            for rank, last in seen.items()
            if last and last.beat.state == RUNNING and self.heartbeat.silence(rank) >= enough
        ]
        self._leave_store(ANSWER_SECONDS)
        alive = self._liveness.ask(silent)
        for rank in alive:
            self._note_busy(rank)
        return [rank for rank in silent if rank not in alive]

    def _leave_store(self, seconds: float) -> None:
        """Do not count the next ``seconds`` as silence of the store: nothing is asked of it."""
        self._answered = self._clock.now + seconds

    def _why_silent(self, rank: int) -> str:
        """Say what a rank that does not answer suffers from, as far as this host can know."""
        state = self.heartbeat.process_state(rank)
        self._leave_store(ANSWER_SECONDS)
        return self._liveness.why_silent(rank, state)

    def _note_busy(self, rank: int) -> None:
        """Count an answer as a beat, and log why there was none for a long time."""
        if self.heartbeat.silence(rank) > self.heartbeat_timeout:
            say(
                f'{self.env.describe()} has seen no beat of {self.heartbeat.describe(rank)}, but '
                f'its process answers: one call there holds the Python interpreter, as a first '
                f'compilation may. The others wait for it, at most env_cfg.dist_cfg.timeout.'
            )
        self.heartbeat.note_answer(rank)

    def peer_failure(self, wait: float = 0.0) -> Optional[RankFailedError]:
        """The report of another rank, waiting ``wait`` seconds for it; None if there is none."""
        self._reported.wait(wait)
        if not self._report or self._report['by'] == self.env.rank:
            return None
        error = self._stops_because(self._report['text'])
        if self._report['host'] == self.heartbeat.host:
            # Ranks of one host mostly share a terminal; one long message is enough.
            error.brief = f'{self.env.describe()} stops too; see rank {self._report["by"]}.'
        return error

    def _stops_because(self, text: str) -> RankFailedError:
        return RankFailedError(f'{self.env.describe()} stops because of {text}')

    def store_lost(self, error: object, silence: float = 0.0) -> RankFailedError:
        """What to raise when the store does not answer any more."""
        found = self.peer_failure()
        if found is not None:
            return found
        waited = f' for {silence:.0f} s' if silence >= 1 else ''
        place = f'{self.env.master_addr}:{self.env.master_port}'
        lost = f'the store at {place}, which has not answered{waited} ({first_line(error)})'
        holder = self.heartbeat.describe(0)
        if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':
            pid = os.environ.get(AGENT) if self.env.single_host else None
            which = f'(pid {pid})' if pid else 'of the host of rank 0'
            holder = f'the command that started the ranks {which}'
        elif self.env.rank == 0:
            return RankFailedError(
                f'{self.env.describe()} stops: it holds {lost}. Its threads get no processor '
                f'time: start fewer processes on this host, or raise '
                f'accelerator.heartbeat_timeout={self.heartbeat_timeout:g}.'
            )
        return self._stops_because(
            f'{holder}: it holds {lost}. That process was killed (out of memory, SIGKILL) or '
            f'stopped (SIGSTOP), or its host or the link to it is down; look at its log and at '
            f'the kernel log of its host.'
        )

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

    def explain(self, error: RuntimeError) -> RankFailedError:
        """Find out why a connection was lost."""
        try:
            return self._find_culprit(error)
        except RuntimeError as lost:
            return self.store_lost(lost)

    def _find_culprit(self, error: RuntimeError) -> RankFailedError:
        self.heartbeat.lost_at = locate_error(error)
        self._set_state(LOST)
        if self.watch_store.add(f'failure/{self.attempt}/lost', 1) > _MAX_INVESTIGATORS:
            self._reported.wait(2 * SILENT_SECONDS)
        found = self.peer_failure(wait=_TICK)
        if found is not None:
            return found
        others = self._others()
        gone = self.heartbeat.find_dead(others)
        if gone:
            return self.report_ranks(gone, GONE)
        silent = self.find_silent(others)
        found = self.peer_failure()
        if found is not None:
            return found
        if silent:
            return self.report_ranks(silent, self._why_silent(silent[0]))
        places = self.heartbeat.places([self.env.rank, *others])
        ended = [rank for rank in others if self.heartbeat.state_of(rank) == ENDED]
        if ended:
            return self.report_ranks(
                ended, f'it ended while the others went on: {describe_places(places[:1])}'
            )
        if len(places) > 1:
            return self._report_places(places)
        hint = network_hint(self.env)
        return RankFailedError(
            f'{self.env.describe()} lost the connection to another rank, which left no message: '
            f'{first_line(error)}. All ranks are alive and in the same place, {places[0][1]}: the '
            f'network loses messages, a rank came later than env_cfg.dist_cfg.timeout, or ranks '
            f"passed tensors of different sizes. Look at the end of the other ranks' logs and at "
            f'the kernel log.{hint}'
        )

    def _report_places(self, places: List[Tuple[List[int], str]]) -> RankFailedError:
        """Report that ranks wait for each other in different places; the first is this rank's."""
        here, elsewhere = places[0][0], sorted(rank for ranks, _ in places[1:] for rank in ranks)
        late = [rank for rank in elsewhere if self.heartbeat.state_of(rank) == RUNNING]
        missing = late or elsewhere
        apart = [place for place in places if not set(place[0]) <= set(late)]
        named = (
            self.heartbeat.describe_all(late) if late else 'ranks that wait in different places'
        )
        text = (
            f'{named}: {describe_places(apart)}. {list_numbers(here).capitalize()} waited for '
            f'{list_numbers(missing)} longer than env_cfg.dist_cfg.timeout, or lost the '
            f'connection; all processes are alive. All ranks have to come to the same collectives '
            f'(averages of gradients, synchronized batch normalization, gather_samples, ...) in '
            f'the same order: look for a branch that depends on the data or on the rank, and for '
            f'ranks with fewer batches'
        )
        if self.report(text, self.env.world_size):
            return self._stops_because(text)
        return self.peer_failure(wait=GRACE_SECONDS) or self._stops_because(text)

    # stopping on purpose ------------------------------------------------------------------------

    def begin_stop_round(self) -> None:
        """Forget earlier requests to stop: another training begins."""
        self.stop_requests.round += 1
        # Another rank may have asked before this one began.
        self._reread = True
        self._wake.set()
