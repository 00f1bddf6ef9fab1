"""Stop all ranks after the same iteration, since they average gradients in all iterations."""

import json
from typing import Optional

from . import failure

#: Schedulers signal every process of a job, and the agent passes the signal on, too. A second
#: signal within this time, in seconds, counts as the same notice.
SAME_NOTICE_SECONDS = 3.0


class StopAgreement:
    """Stop all ranks of a training after the same iteration, at the request of any rank.

    All ranks create it when training begins. The rank that asks leaves a request in the store,
    which the thread of each rank reads. From then on each rank publishes its iteration. The last
    one to do so chooses an iteration that no rank has finished: ranks that average gradients are
    never further apart than one average.

    Examples:
        >>> agreement = StopAgreement()
        >>> agreement.request('SIGTERM')
        >>> agreement.reached(iteration=7, interval=1)  # in a single process
        True
    """

    #: Iterations between the one in which the last rank published and the chosen one.
    MARGIN = 3

    def __init__(self) -> None:
        self._asked: Optional[str] = None
        self._published = False
        self._watch = failure.current_watch()
        if self._watch is not None:
            self._watch.begin_stop_round()
            self._round = self._watch.stop_requests.round
        self.iteration: Optional[int] = None

    @property
    def why(self) -> str:
        """Why all ranks stop."""
        return str((self._watch and self._watch.stop_requests.reason) or self._asked)

    def request(self, why: str) -> None:
        """Ask all ranks to stop; safe in a signal handler."""
        self._asked = why
        if self._watch is not None:
            self._watch.stop_requests.request(why)

    def reached(self, iteration: int, interval: int) -> bool:
        """Whether to stop now; called by all ranks after each iteration.

        Args:
            iteration (int): How many iterations are done.
            interval (int): After how many iterations ranks average gradients.
        """
        if self._watch is None:
            return self._asked is not None
        if self._watch.stop_requests.reason is None:
            return False
        if self.iteration is None:
            self.iteration = self._agree(self._watch, iteration, interval)
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
