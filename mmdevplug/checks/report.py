"""Print the report on the terminal."""

from typing import Sequence

from rich.console import Console
from rich.text import Text

from .findings import LEVELS, Finding

COLOURS = {'error': 'bold red', 'warning': 'yellow', 'note': 'cyan', 'ok': 'green'}


def print_finding(finding: Finding, console: Console) -> None:
    """Print what was found, why it matters and what to do, in lines that can be copied."""
    # Text, not str: what was found may look like markup of rich.
    level = Text(f'{finding.level:8}', style=COLOURS[finding.level])
    found = finding.found.replace('\n', '\n' + ' ' * 8)
    console.print(level + Text(found), soft_wrap=True)
    if finding.level in ('error', 'warning') or finding.remedy:
        for word, said in (('why', finding.why), ('do', finding.remedy)):
            if said:
                console.print(Text(f'        {word}: {said}'), soft_wrap=True)


def print_counts(findings: Sequence[Finding], console: Console) -> None:
    """Print the number of findings of each level."""
    levels = [finding.level for finding in findings]
    counts = [(level, levels.count(level)) for level in LEVELS]
    numbers = [f'{n} {level}{"s" if n != 1 and level != "ok" else ""}' for level, n in counts]
    console.print(Text(', '.join(numbers), style='bold'))
