"""Define what the doctor reports: findings with a level, a reason and a remedy."""

from functools import partial
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

#: From the worst to the best.
LEVELS = ('error', 'warning', 'note', 'ok')


class Finding(NamedTuple):
    """One line of the report: what was found, and why it matters."""

    section: str  # e.g. 'network'
    level: str  # of LEVELS: training will fail; it may fail or be slow; worth knowing; fine
    found: str
    why: str = ''
    remedy: str = ''  # the exact command or line of a config that fixes it
    data: Optional[Dict[str, Any]] = None  # figures for the JSON file

    def as_dict(self) -> Dict[str, Any]:
        """Convert to the same keys for every finding, as JSON takes them."""
        return dict(self._asdict(), data=self.data or {})


class Section:
    """Make the findings of one section, e.g. ``Section('network').error(found, why, remedy)``."""

    def __init__(self, name: str) -> None:
        self.finding = partial(Finding, name)
        self.error, self.warning, self.note, self.ok = (
            partial(self.finding, level) for level in LEVELS
        )


def by_level(findings: Iterable[Finding]) -> List[Finding]:
    """Sort from the worst to the best, keeping the order within a level."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def count_levels(findings: Iterable[Finding]) -> Dict[str, int]:
    """Count the findings of each level."""
    levels = [finding.level for finding in findings]
    return {level: levels.count(level) for level in LEVELS}


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if there is an error, else 0."""
    return int(any(finding.level == 'error' for finding in findings))
