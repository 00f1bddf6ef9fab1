"""What an examination finds, and what is to be done about it."""

from typing import Any, Dict, Iterable, List, NamedTuple, Optional

#: From the worst to the best.
LEVELS = ('error', 'warning', 'note', 'ok')


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        section (str): The part of the report, e.g. ``'network'``.
        level (str): ``'error'``: training will fail; ``'warning'``: it may fail or be slow;
            ``'note'``: worth knowing; ``'ok'``.
        found (str): What was found.
        why (str): Why it matters.
        remedy (str): The exact command or line of a config that mends it.
        data (dict, optional): Figures for those who read the JSON file.
    """

    section: str
    level: str
    found: str
    why: str = ''
    remedy: str = ''
    data: Optional[Dict[str, Any]] = None

    def as_dict(self) -> Dict[str, Any]:
        """The same keys for every finding, as JSON takes them."""
        return dict(self._asdict(), data=self.data or {})


def by_level(findings: Iterable[Finding]) -> List[Finding]:
    """Sort from the worst to the best; the order within a level is kept.

    Examples:
        >>> [f.level for f in by_level([Finding('a', 'ok', ''), Finding('b', 'error', '')])]
        ['error', 'ok']
    """
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def count_levels(findings: Iterable[Finding]) -> Dict[str, int]:
    """How many findings there are of each level."""
    levels = [finding.level for finding in findings]
    return {level: levels.count(level) for level in LEVELS}


def summary(findings: Iterable[Finding]) -> str:
    """One phrase, e.g. ``'1 error, 2 warnings, 0 notes, 9 ok'``."""
    plural = {'error': 'errors', 'warning': 'warnings', 'note': 'notes', 'ok': 'ok'}
    counts = count_levels(findings)
    return ', '.join(f'{n} {level if n == 1 else plural[level]}' for level, n in counts.items())


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if there is an error, else 0."""
    return int(any(finding.level == 'error' for finding in findings))
