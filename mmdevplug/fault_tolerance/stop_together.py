"""Stop all ranks after the same iteration, since they average gradients in all iterations.

:class:`StopRequests` carries a request from one rank to the others, and :class:`StopAgreement`
chooses the iteration.
"""

import json
from typing import Any, Dict, Optional, Tuple

from torch import distributed as torch_dist

from mmdevplug.utils.torch_compat import get_text, set_text


class StopRequests:
    """Which trainings of this process are to stop, and why.

    A training is a round, with the same number on all ranks: what an earlier training left in the
    store stops no later one. A signal handler, which must not wait for a connection or a lock in
    use, only calls :meth:`request`; the thread of :class:`.failure_watch.FailureWatch` writes and
    reads the store.
    """

    def __init__(self, store: 'torch_dist.Store') -> None:
        self._store = store
        self.round = 0
        self._reasons: Dict[int, str] = {}
        self._to_publish: Optional[Tuple[int, str]] = None

    @property
    def reason(self) -> Optional[str]:
        """Why all ranks are to stop, None if no rank asked for it."""
        return self._reasons.get(self.round)

    def request(self, why: str) -> None:
        """Ask all ranks to stop soon."""
        self._to_publish = (self.round, why)

    def publish(self) -> None:
        """Write a request of this rank to the store, unless another rank was first."""
        if self._to_publish is None:
            return
        (number, why), self._to_publish = self._to_publish, None
        if self._store.add(f'stop/{number}/count', 1) == 1:
            set_text(self._store, f'stop/{number}/why', json.dumps(why))
            self._store.add(f'stop/{number}/there', 1)
            self._store.add('events', 1)

    def read(self) -> None:
        """Read a request of any rank from the store."""
        number = self.round
        if number not in self._reasons and self._store.add(f'stop/{number}/there', 0):
            self._reasons[number] = json.loads(get_text(self._store, f'stop/{number}/why'))


class StopAgreement:
    """Stop all ranks of a training after the same iteration, at the request of any rank.

    All ranks create it when training begins, with the :class:`.failure_watch.FailureWatch` of
    their process, None in a single process. The rank that asks leaves a request in the store,
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

    def __init__(self, watch: Any = None) -> None:
        self._asked: Optional[str] = None
        self._published = False
        self._watch = watch
        if watch is not None:
            watch.begin_stop_round()
            self._round = watch.stop_requests.round
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
        """Whether to stop now; all ranks call it after the same iteration.

        ``interval`` is the number of iterations after which ranks average gradients.
        """
        if self._watch is None:
            return self._asked is not None
        if self._watch.stop_requests.reason is None:
            return False
        if self.iteration is None:
            self.iteration = self._agree(iteration, interval)
        return self.iteration is not None and iteration >= self.iteration

    def _agree(self, iteration: int, interval: int) -> Optional[int]:
        store, env, keys = self._watch.watch_store, self._watch.env, f'stop/{self._round}'
        if not self._published:
            self._published = True
            set_text(store, f'{keys}/seen/{env.rank}', str(iteration))
            if store.add(f'{keys}/published', 1) == env.world_size:
                seen = [
                    int(get_text(store, f'{keys}/seen/{rank}')) for rank in range(env.world_size)
                ]
                set_text(store, f'{keys}/at', json.dumps(max(seen) + self.MARGIN + interval))
                store.add(f'{keys}/decided', 1)
        if not store.add(f'{keys}/decided', 0):
            return None
        return json.loads(get_text(store, f'{keys}/at'))
