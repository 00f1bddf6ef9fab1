"""Stop all ranks after the same iteration, without a message in ordinary iterations."""

import json
from typing import Optional

from . import failure
from .store_barrier import next_round

#: Schedulers signal every process of a job, and the agent passes the signal on, too. A second
#: signal within this time, in seconds, counts as the same notice.
SAME_NOTICE_SECONDS = 3.0


class StopAgreement:
    """Let all ranks of a job, asked by any one, stop after the same iteration.

    One object serves one training; all ranks create it when training begins.

    The rank that is asked leaves a request in the store, which the thread of each rank sees. From
    then on each rank publishes where it is. The last one to do so chooses an iteration that no
    rank has finished: ranks that average gradients are never further apart than one average.

    Examples:
        >>> agreement = StopAgreement()
        >>> agreement.request('SIGTERM')
        >>> agreement.reached(iteration=7, interval=1)  # in a single process
        True
    """

    #: So many iterations after the one in which the last rank published.
    MARGIN = 3

    def __init__(self) -> None:
        self._asked: Optional[str] = None
        self._published = False
        #: All ranks count alike how often they have trained, so that what an earlier training
        #: has left in the store stops no later one.
        self._round = next_round('stop')
        watch = failure.current_watch()
        if watch is not None:
            watch.begin_stop_round(self._round)
        self.iteration: Optional[int] = None

    @property
    def why(self) -> str:
        """Why all stop."""
        watch = failure.current_watch()
        return str((watch.stop_requests.reason if watch is not None else None) or self._asked)

    def request(self, why: str) -> None:
        """Ask all ranks to stop; safe in a signal handler."""
        self._asked = why
        watch = failure.current_watch()
        if watch is not None:
            watch.stop_requests.request(why)

    def reached(self, iteration: int, interval: int) -> bool:
        """Whether to stop now; called by all ranks after each iteration.

        Args:
            iteration (int): How many iterations are done.
            interval (int): After how many iterations ranks average gradients.
        """
        watch = failure.current_watch()
        if watch is None:
            return self._asked is not None
        if watch.stop_requests.reason is None:
            return False
        if self.iteration is None:
            self.iteration = self._agree(watch, iteration, interval)
        return self.iteration is not None and iteration >= self.iteration

    def _agree(self, watch: failure.FailureWatch, iteration: int, interval: int) -> Optional[int]:
        store, env, keys = watch.own, watch.env, f'stop/{self._round}'
        if not self._published:
            self._published = True
            store.set(f'{keys}/seen/{env.rank}', str(iteration))
            if store.add(f'{keys}/published', 1) == env.world_size:
                seen = [int(store.get(f'{keys}/seen/{rank}')) for rank in range(env.world_size)]
                store.set(f'{keys}/at', json.dumps(max(seen) + self.MARGIN + interval))
                store.add(f'{keys}/decided', 1)
        if not store.add(f'{keys}/decided', 0):
            return None
        return json.loads(store.get(f'{keys}/at'))
