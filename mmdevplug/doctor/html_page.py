"""Write the report as one HTML file that loads nothing from anywhere."""

from typing import List, Sequence, Tuple

from rich.console import Console
from rich.text import Text

from mmdevplug.utils.html_page import make_page

from .findings import Finding
from .plots import plot_collectives, plot_memory
from .report import collective_results, print_report


def render(findings: Sequence[Finding], subtitle: str) -> str:
    """Make the page: what the terminal shows, and pictures.

    Args:
        findings (Sequence[Finding]): In the order of sections.
        subtitle (str): What was looked at, e.g. the command line.

    Returns:
        str: HTML.
    """

    def write(console: Console) -> None:
        console.print(Text(subtitle))
        print_report(findings, console)

    return make_page('mmdevplug doctor', write, _pictures(findings))


def _pictures(findings: Sequence[Finding]) -> List[Tuple[str, str]]:
    pictures = []
    results = collective_results(findings)
    drawn = None if results is None else plot_collectives(results)
    if drawn is not None:
        pictures.append(('Time and bandwidth over size', drawn))
    for finding in findings:
        if finding.data is not None and 'memory_parts' in finding.data:
            data = finding.data
            drawn = plot_memory(data['memory_parts'], data['memory_total'])
            pictures.append(('Memory on each device', drawn))
            break
    return pictures
