"""Carry a request to stop from one rank to the others, through the store."""

import json
from typing import Any, Dict, Optional, Tuple


class StopRequests:
    """Which trainings of this process are to stop, and why.

    A training is a round, with the same number on all ranks: what an earlier training left in the
    store stops no later one. A signal handler, which must not wait for a connection or a lock in
    use, only calls :meth:`request`; the thread of :class:`.failure_watch.FailureWatch` writes and
    reads the store.
    """

    def __init__(self, store: Any) -> None:
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
            self._store.set(f'stop/{number}/why', json.dumps(why))
            self._store.add(f'stop/{number}/there', 1)
            self._store.add('events', 1)

    def read(self) -> None:
        """Read a request of any rank from the store."""
        number = self.round
        if number not in self._reasons and self._store.add(f'stop/{number}/there', 0):
            self._reasons[number] = json.loads(self._store.get(f'stop/{number}/why'))
