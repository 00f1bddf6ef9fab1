"""Count what the collectives of this rank cost, for logs and reports."""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Dict, Iterator


@dataclass
class Cost:
    """The cost of some messages of one kind."""

    messages: int = 0  # number of collectives
    sent: float = 0.0  # bytes that this rank sent over a network or the loopback interface
    shared: float = 0.0  # bytes that it exchanged in memory shared with ranks of its host
    seconds: float = 0.0  # from the start of each collective to its end, added up
    waited: float = 0.0  # the part of `seconds` in which this rank did nothing else

    @property
    def overlap(self) -> float:
        """The fraction of the communication that was hidden behind other work, 0 to 1."""
        return max(0.0, 1.0 - self.waited / self.seconds) if self.seconds > 0 else 0.0


class Traffic:
    """Add up costs by kind (``'gradients'``, ``'sync_bn'``, ...)."""

    def __init__(self) -> None:
        self._costs: Dict[str, Cost] = {}

    def record(self, kind: str, *, messages: int = 1, **costs: float) -> None:
        """Add the cost of some messages; ``costs`` are fields of :class:`Cost`."""
        total = self._costs.setdefault(kind, Cost())
        for name, value in dict(costs, messages=messages).items():
            setattr(total, name, getattr(total, name) + value)

    def take(self) -> Dict[str, Cost]:
        """Return the costs by kind since the last call."""
        costs, self._costs = self._costs, {}
        return costs


#: The traffic of this process.
TRAFFIC = Traffic()


@contextmanager
def waiting(kind: str, through_host: bool = True) -> Iterator[None]:
    """Count the seconds of this context, in which this rank does nothing but wait for others.

    Messages that do not go ``through_host`` only begin in it, and are not counted.
    """
    begin = time.perf_counter()
    yield
    if not through_host:
        return
    seconds = time.perf_counter() - begin
    TRAFFIC.record(kind, seconds=seconds, waited=seconds)


def all_reduce_bytes(size: float, world_size: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of ``size`` bytes."""
    return 2.0 * size * (world_size - 1) / world_size
