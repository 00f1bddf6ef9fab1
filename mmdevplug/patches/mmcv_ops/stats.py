"""Count what ran on the host, by operator."""

import threading
from dataclasses import dataclass
from typing import Callable, Dict

MB = 1024 * 1024


@dataclass
class OperatorUse:
    """What one operator has cost so far."""

    calls: int = 0  # how often it ran on the host
    fetched: int = 0  # bytes copied from the device
    sent: int = 0  # bytes copied back
    seconds: float = 0.0  # total time, with waiting for the device
    where: str = ''  # where it was used first


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

    def begin(self, name: str, where: Callable[[], str]) -> bool:
        """Note where an operator is used, if this is the first time; whether it is."""
        with self._lock:
            new = name not in self._uses
            if new:
                self._uses[name] = OperatorUse(where=where())
        return new

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
