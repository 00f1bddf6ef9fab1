"""Count what the collectives of this rank cost, for logs and reports."""

from dataclasses import dataclass
from typing import Dict


@dataclass
class Cost:
    """The cost of some messages of one kind.

    Attributes:
        messages (int): Number of collectives.
        sent (float): Bytes that this rank sent over a network or the loopback interface.
        shared (float): Bytes that it exchanged in memory shared with ranks of its host.
        seconds (float): From the start of each collective to its end, added up.
        waited (float): The part of ``seconds`` in which this rank did nothing else.
    """

    messages: int = 0
    sent: float = 0.0
    shared: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def overlap(self) -> float:
        """The fraction of the communication that was hidden behind other work, 0 to 1."""
        return max(0.0, 1.0 - self.waited / self.seconds) if self.seconds > 0 else 0.0


class Traffic:
    """Adds up costs by kind (``'gradients'``, ``'sync_bn'``, ...) until they are taken."""

    def __init__(self) -> None:
        self._costs: Dict[str, Cost] = {}

    def record(
        self,
        kind: str,
        sent: float = 0.0,
        seconds: float = 0.0,
        waited: float = 0.0,
        messages: int = 1,
        shared: float = 0.0,
    ) -> None:
        """Add a cost.

        Args:
            kind (str): What the messages were for.
            sent (float): Bytes that this rank sent. Defaults to 0.
            seconds (float): Duration. Defaults to 0.
            waited (float): The part of it that nothing else was done in. Defaults to 0.
            messages (int): Number of collectives. Defaults to 1.
            shared (float): Bytes exchanged in shared memory. Defaults to 0.
        """
        cost = self._costs.setdefault(kind, Cost())
        cost.messages += messages
        cost.sent += sent
        cost.shared += shared
        cost.seconds += seconds
        cost.waited += waited

    def take(self) -> Dict[str, Cost]:
        """The costs by kind since the last call."""
        costs, self._costs = self._costs, {}
        return costs


#: The traffic of this process.
TRAFFIC = Traffic()


def all_reduce_bytes(size: float, world_size: int) -> float:
    """Bytes that a rank sends in an all-reduce of ``size`` bytes, as a ring does it."""
    return 2.0 * size * (world_size - 1) / world_size
