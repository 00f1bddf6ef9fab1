"""Count what ran on the host, by operator."""

import threading
from dataclasses import dataclass
from typing import Dict

MB = 1024 * 1024


@dataclass
class OperatorUse:
    """What one operator has cost so far.

    Attributes:
        calls (int): How often it ran on the host.
        fetched (int): Bytes copied from the device.
        sent (int): Bytes copied back.
        seconds (float): Total time, with waiting for the device.
        where (str): Where it was used first.
    """

    calls: int = 0
    fetched: int = 0
    sent: int = 0
    seconds: float = 0.0
    where: str = ''


class HostUse:
    """Counts by operator; autograd's threads write to it, too."""

    def __init__(self) -> None:
        self._uses: Dict[str, OperatorUse] = {}
        self._lock = threading.Lock()

    def add(self, name: str, fetched: int, sent: int, seconds: float) -> None:
        """Count one call."""
        with self._lock:
            use = self._uses.setdefault(name, OperatorUse())
            use.calls += 1
            use.fetched += fetched
            use.sent += sent
            use.seconds += seconds

    def begin(self, name: str, where: str) -> bool:
        """Note where an operator is used; whether this is the first time."""
        with self._lock:
            new = name not in self._uses
            self._uses.setdefault(name, OperatorUse(where=where))
        return new

    def knows(self, name: str) -> bool:
        """Whether an operator was used before."""
        return name in self._uses

    def uses(self) -> Dict[str, OperatorUse]:
        """A copy of the counts."""
        with self._lock:
            return {name: OperatorUse(**vars(use)) for name, use in self._uses.items()}


def describe_uses(uses: Dict[str, OperatorUse]) -> str:
    """A table of the operators that ran on the host, sorted by bytes copied."""
    width = max([len(name) for name in uses] + [len('operator')])
    lines = [f'{"operator":{width}} {"calls":>8} {"MB fetched":>11} {"MB sent":>9} {"seconds":>8}']
    for name, use in sorted(uses.items(), key=lambda item: -item[1].fetched - item[1].sent):
        lines.append(
            f'{name:{width}} {use.calls:8} {use.fetched / MB:11.2f} {use.sent / MB:9.2f} '
            f'{use.seconds:8.2f}'
        )
    return '\n'.join(lines)
