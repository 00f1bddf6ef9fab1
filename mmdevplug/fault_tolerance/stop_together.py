"""Stop all ranks after the same iteration, since they average gradients in all iterations."""

import json
from typing import Any, Optional

from mmdevplug.utils.torch_compat import get_text, set_text


class StopAgreement:
    """Stop all ranks of a training after the same iteration, at the request of any rank.

    All ranks create it when training begins, with the :class:`.failure_watch.FailureWatch` of
    their process, None in a single process. A signal handler, which must not wait for a connection
    or a lock in use, only calls :meth:`request`; the watch's thread leaves the request in the
    store, and finds there those of other ranks. From then on each rank publishes its iteration.
    The last one to do so chooses an iteration that no rank has finished: ranks that average
    gradients are never further apart than one average.

    Trainings are numbered, alike on all ranks: what one left in the store stops no later one.

    Examples:
        >>> agreement = StopAgreement()
        >>> agreement.request('SIGTERM')
        >>> agreement.reached(iteration=7, interval=1)  # in a single process
        True
    """

    #: Iterations between the one in which the last rank published and the chosen one.
    MARGIN = 3

    def __init__(self, watch: Any = None) -> None:
        #: Why all ranks are to stop, None if no rank asked for it.
        self.why: Optional[str] = None
        self._asked: Optional[str] = None
        self._watch = watch
        self._published = False
        self.iteration: Optional[int] = None
        self.keys = ''  # of this training, in the store
        if watch is not None:
            watch.begin_training(self)

    def request(self, why: str) -> None:
        """Ask all ranks to stop soon; safe in a signal handler."""
        self._asked = why

    def publish(self) -> None:
        """Write a request of this rank to the store, unless another rank was first."""
        why = self._asked
        if why is None:
            return
        self._asked, store = None, self._watch.watch_store
        if store.add(f'{self.keys}/count', 1) == 1:
            set_text(store, f'{self.keys}/why', json.dumps(why))
            store.add(f'{self.keys}/there', 1)
            self._watch.events.add()

    def read(self) -> None:
        """Read a request of any rank from the store."""
        store = self._watch.watch_store
        if self.why is None and store.add(f'{self.keys}/there', 0):
            self.why = json.loads(get_text(store, f'{self.keys}/why'))

    def reached(self, iteration: int, interval: int) -> bool:
        """Whether to stop now; all ranks call it after the same iteration.

        ``interval`` is the number of iterations after which ranks average gradients.
        """
        if self._watch is None:
            self.why = self._asked
            return self.why is not None
        if self.why is not None and self.iteration is None:
            self.iteration = self._agree(iteration, interval)
        return self.iteration is not None and iteration >= self.iteration

    def _agree(self, iteration: int, interval: int) -> Optional[int]:
        store, env, keys = self._watch.watch_store, self._watch.env, self.keys
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
