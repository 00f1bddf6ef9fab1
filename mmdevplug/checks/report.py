"""Print the report on the terminal."""

from typing import Any, Dict, List, Sequence

from rich.box import HEAVY_HEAD, SIMPLE_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .findings import Finding, by_level, count_levels

COLOURS = {'error': 'bold red', 'warning': 'yellow', 'note': 'cyan', 'ok': 'green'}


def titled_table(title: str, box: Box = SIMPLE_HEAD, expand: bool = False) -> Table:
    """Make an empty table below a bold title."""
    return Table(title=title, title_justify='left', title_style='bold', box=box, expand=expand)


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """Print a table for each section, then what to do, then the number of findings."""
    sections: Dict[str, List[Finding]] = {}
    for finding in findings:
        sections.setdefault(finding.section, []).append(finding)
    for section, found in sections.items():
        # Text, not str: what was found may look like markup of rich.
        table = titled_table(section, box=HEAVY_HEAD, expand=True)
        table.add_column('', no_wrap=True)
        table.add_column('found', ratio=1, overflow='fold')
        for finding in by_level(found):
            table.add_row(Text(finding.level, style=COLOURS[finding.level]), Text(finding.found))
        console.print(table)
    results = next((f.data for f in findings if f.data is not None and 'checks' in f.data), None)
    if results is not None:
        print_collectives(results, console)
    _print_remedies(findings, console)
    counts = count_levels(findings)
    numbers = [
        f'{count} {level}{"s" if count != 1 and level != "ok" else ""}'
        for level, count in counts.items()
    ]
    console.print(Text(', '.join(numbers), style='bold'))


def _print_remedies(findings: Sequence[Finding], console: Console) -> None:
    for finding in by_level(findings):
        if finding.level not in ('error', 'warning') and not finding.remedy:
            continue
        console.print()
        console.print(Text(f'{finding.level}: ', COLOURS[finding.level]) + Text(finding.found))
        if finding.why:
            console.print(Text(f'  why: {finding.why}'))
        if finding.remedy:
            # In one line, so that it can be copied.
            console.print(Text(f'  do:  {finding.remedy}'), soft_wrap=True)
    console.print()


def print_collectives(results: Dict[str, Any], console: Console) -> None:
    """Print a table of the results of :func:`mmdevplug.checks.collectives_rank.run_rank`."""
    sizes = message_sizes(results)
    table = titled_table(
        f'{results["world_size"]} ranks over {results["backend"]}: latency in ms, then MB/s of '
        f'the bytes that a rank puts in'
    )
    table.add_column('', no_wrap=True)
    table.add_column('', no_wrap=True)
    for heading in ('ms', *map(describe_size, sizes)):
        table.add_column(heading, justify='right', no_wrap=True)
    for check in results['checks']:
        seconds = {point['bytes']: point['seconds'] for point in check['points']}
        rates = [size / seconds[size] / 1e6 if size in seconds else None for size in sizes]
        table.add_row(
            check['name'],
            Text(check['status'], COLOURS['ok' if check['status'] == 'pass' else 'error']),
            f'{1e3 * seconds[min(seconds)]:.2f}' if seconds else '',
            *['' if rate is None else f'{rate:.{0 if rate >= 10 else 1}f}' for rate in rates],
        )
    console.print(table)
    for check in results['checks']:
        for problem in check['problems']:
            console.print(Text(f'{check["name"]}: {problem}', style=COLOURS['error']))


def message_sizes(results: Dict[str, Any]) -> List[int]:
    """List the bytes of all timed messages in order."""
    points = [point for check in results['checks'] for point in check['points']]
    return sorted({point['bytes'] for point in points} - {0})


def describe_size(size: int) -> str:
    """Shorten a number of bytes, e.g. ``'16K'``."""
    return f'{size >> 20}M' if size >= 1 << 20 else f'{size / 1024:g}K'
