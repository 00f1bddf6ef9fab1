"""The report on the terminal."""

from typing import Any, Dict, List, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .findings import Finding, by_level, summary

UNITS = 'latency in ms, then MB/s of the bytes that a rank puts in'
COLOURS = {'error': 'bold red', 'warning': 'yellow', 'note': 'cyan', 'ok': 'green'}


def print_report(findings: Sequence[Finding], console: Console) -> None:
    """Print a table for each section, and then what there is to do.

    Args:
        findings (Sequence[Finding]): In the order of sections.
        console (Console): Where to.
    """
    sections: Dict[str, List[Finding]] = {}
    for finding in findings:
        sections.setdefault(finding.section, []).append(finding)
    for section, found in sections.items():
        console.print(_section_table(section, found))
    results = collective_results(findings)
    if results is not None:
        print_collectives(results, console)
    _print_remedies(findings, console)
    console.print(Text(summary(findings), style='bold'))


def _section_table(section: str, findings: Sequence[Finding]) -> Table:
    # Text, not str: what was found may look like markup of rich.
    table = Table(title=section, title_justify='left', title_style='bold', expand=True)
    table.add_column('', no_wrap=True)
    table.add_column('found', ratio=1, overflow='fold')
    for finding in by_level(findings):
        table.add_row(Text(finding.level, style=COLOURS[finding.level]), Text(finding.found))
    return table


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


def collective_results(findings: Sequence[Finding]) -> Any:
    """The results of the test of collectives among the findings, None without one."""
    for finding in findings:
        if finding.data is not None and 'checks' in finding.data:
            return finding.data
    return None


def print_collectives(results: Dict[str, Any], console: Console) -> None:
    """Print a table of the collectives.

    Args:
        results (dict): Of the test of collectives.
        console (Console): Where to.
    """
    sizes = sizes_of(results)
    table = Table(
        title=f'{results["world_size"]} ranks over {results["backend"]}: {UNITS}',
        title_justify='left',
        title_style='bold',
        box=SIMPLE_HEAD,
    )
    table.add_column('', no_wrap=True)
    table.add_column('', no_wrap=True)
    for name in headings(sizes):
        table.add_column(name, justify='right', no_wrap=True)
    for check in results['checks']:
        colour = {'pass': 'ok', 'fail': 'error'}.get(check['status'], 'note')
        status = Text(check['status'], style=COLOURS[colour])
        table.add_row(check['name'], status, *cells_of(check, sizes))
    console.print(table)
    for check in results['checks']:
        for problem in check['problems']:
            console.print(Text(f'{check["name"]}: {problem}', style=COLOURS['error']))


def sizes_of(results: Dict[str, Any]) -> List[int]:
    """All sizes of messages, in order."""
    points = [point for check in results['checks'] for point in check['points']]
    return sorted({point['bytes'] for point in points} - {0})


def headings(sizes: Sequence[int]) -> List[str]:
    """The columns of :func:`cells_of`."""
    return ['ms', *[_size(size) for size in sizes]]


def cells_of(check: Dict[str, Any], sizes: Sequence[int]) -> List[str]:
    """The time of the smallest message, and the bandwidth for each size."""
    found = {point['bytes']: point['seconds'] for point in check['points']}
    latency = f'{1e3 * found[min(found)]:.2f}' if found else ''
    return [latency, *[_rate(size / found[size]) if size in found else '' for size in sizes]]


def _rate(bytes_per_second: float) -> str:
    megabytes = bytes_per_second / 1e6
    return f'{megabytes:.0f}' if megabytes >= 10 else f'{megabytes:.1f}'


def _size(size: int) -> str:
    return f'{size >> 20}M' if size >= 1 << 20 else f'{size / 1024:g}K'
