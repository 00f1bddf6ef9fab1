"""Define what the doctor reports: findings with a level, a reason and a remedy."""

from functools import partial
from typing import Iterable, NamedTuple

#: From the worst to the best.
LEVELS = ('error', 'warning', 'note', 'ok')


class Finding(NamedTuple):
    """One line of the report: what was found, and why it matters."""

    section: str  # e.g. 'launch'
    level: str  # of LEVELS: training will fail; it may fail or be slow; worth knowing; fine
    found: str
    why: str = ''
    remedy: str = ''  # the exact command or line of a config that fixes it


class Section:
    """Make the findings of one section, e.g. ``Section('launch').error(found, why, remedy)``."""

    def __init__(self, name: str) -> None:
        self.finding = partial(Finding, name)
        self.error, self.warning, self.note, self.ok = (
            partial(self.finding, level) for level in LEVELS
        )


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if there is an error, else 0."""
    return int(any(finding.level == 'error' for finding in findings))
