"""Count what a guard found and moved, by place."""

import threading
from dataclasses import dataclass
from typing import Dict, NamedTuple


class Site(NamedTuple):
    """A place in the code where operands are on different devices."""

    operation: str  #: E.g. ``'torch.stack'``.
    file: str  #: The user's file.
    line: int  #: The line in it.
    where: str  #: Module and backward, or the function: see :meth:`Mismatch.where`.
    code: str = ''  #: The statement.


@dataclass
class SiteCount:
    """What happened at a place.

    Attributes:
        times (int): Operations with operands of different devices.
        number (int): Tensors that were moved.
        bytes (int): Their size.
    """

    times: int = 0
    number: int = 0
    bytes: int = 0


class Moved(NamedTuple):
    """What a guard has moved."""

    number: int  #: Tensors.
    bytes: int  #: Their size.
    sites: Dict[Site, SiteCount]  #: The same by place, where anything was moved.


class MoveStats:
    """Counts by place; autograd's threads write to it, too."""

    def __init__(self) -> None:
        self._sites: Dict[Site, SiteCount] = {}
        self._lock = threading.Lock()

    def add(self, site: Site, number: int = 0, size: int = 0) -> bool:
        """Count an operation and the tensors moved for it; returns whether the place is new."""
        with self._lock:
            new = site not in self._sites
            count = self._sites.setdefault(site, SiteCount())
            count.times += 1
            count.number += number
            count.bytes += size
        return new

    def sites(self) -> Dict[Site, SiteCount]:
        """A copy of the counts by place."""
        with self._lock:
            return {site: SiteCount(**vars(count)) for site, count in self._sites.items()}

    def moved(self) -> Moved:
        """The sums so far."""
        sites = {site: count for site, count in self.sites().items() if count.number}
        counts = sites.values()
        return Moved(sum(c.number for c in counts), sum(c.bytes for c in counts), sites)

    def report(self) -> str:
        """A table of the places, the most bytes first."""
        sites, moved = self.sites(), self.moved()
        if not sites:
            return 'No operation had operands on different devices.'
        times = sum(count.times for count in sites.values())
        lines = [
            f'{times} operation(s) at {len(sites)} place(s) had operands on different devices; '
            f'{moved.number} tensor(s), {moved.bytes} bytes were moved.',
            f'{"times":>8} {"tensors":>8} {"bytes":>12}  operation, module, line',
        ]
        ordered = sorted(sites.items(), key=lambda item: (-item[1].bytes, -item[1].times))
        for site, count in ordered:
            line = f', {site.file}:{site.line}: {site.code}' if site.file else ''
            lines.append(
                f'{count.times:8} {count.number:8} {count.bytes:12}  '
                f'{site.operation}, {site.where}{line}'
            )
        return '\n'.join(lines)
