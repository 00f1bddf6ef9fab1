"""Write the report as one HTML file that loads nothing from anywhere."""

import base64
import io
from typing import Any, Dict, Optional, Sequence

from matplotlib import cm
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from mmdevplug.utils.html_page import make_page

from .findings import Finding
from .report import describe_size, find_data, message_sizes, print_report


def render(findings: Sequence[Finding], subtitle: str) -> str:
    """Return the page as HTML: what the terminal shows, and pictures."""

    def write(console: Console) -> None:
        console.print(Text(subtitle))
        print_report(findings, console)

    pictures = []
    collectives, memory = find_data(findings, 'checks'), find_data(findings, 'memory_parts')
    if collectives is not None:
        pictures.append(('Time and bandwidth over size', _plot_collectives(collectives)))
    if memory is not None:
        picture = _plot_memory(memory['memory_parts'], memory['memory_total'])
        pictures.append(('Memory on each device', picture))
    return make_page('mmdevplug doctor', write, pictures)


def _plot_collectives(results: Dict[str, Any]) -> str:
    """Draw time and bandwidth over the size of messages."""
    figure = Figure(figsize=(11, 4.2))
    time_axes, rate_axes = figure.subplots(1, 2)
    sized = [c for c in results['checks'] if c['points'] and c['points'][0]['bytes']]
    for check, marker, colour in zip(sized, 'os^vD', cm.tab20.colors):
        sizes = [point['bytes'] for point in check['points']]
        seconds = [point['seconds'] for point in check['points']]
        look = dict(marker=marker, markersize=4, color=colour)
        time_axes.plot(sizes, [1e3 * s for s in seconds], label=check['name'], **look)
        rate_axes.plot(sizes, [b / s / 1e6 for b, s in zip(sizes, seconds)], **look)
    ticks = message_sizes(results)
    for axes, label in ((time_axes, 'milliseconds'), (rate_axes, 'MB/s')):
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.set_xticks(ticks, list(map(describe_size, ticks)))
        axes.set_xlabel('bytes that a rank puts in')
        axes.set_ylabel(label)
        axes.grid(True, which='major', alpha=0.3)
        axes.spines[['top', 'right']].set_visible(False)
    time_axes.set_title('time of the slowest rank, median')
    rate_axes.set_title('bandwidth')
    figure.legend(loc='center right', fontsize='small', frameon=False)
    figure.tight_layout(rect=(0, 0, 0.82, 1))
    return _as_base64(figure)


def _plot_memory(parts: Dict[str, float], total: Optional[float]) -> str:
    """Draw what a device has to hold; ``total`` is its memory in bytes."""
    figure = Figure(figsize=(8, 1.9))
    axes = figure.subplots()
    left = 0.0
    for name, size in parts.items():
        axes.barh([0], [size / 2**20], left=left / 2**20, label=name, height=0.5)
        left += size
    if total is not None and total < 20 * left:
        axes.axvline(total / 2**20, color='black', linestyle='dashed', label='the device')
    axes.set_yticks([])
    axes.set_xlabel('MB on each device, without activations')
    axes.spines[['top', 'right', 'left']].set_visible(False)
    axes.legend(
        ncol=5, fontsize='small', frameon=False, loc='lower center', bbox_to_anchor=(0.5, 1)
    )
    figure.tight_layout()
    return _as_base64(figure)


def _as_base64(figure: Figure) -> str:
    data = io.BytesIO()
    figure.savefig(data, format='png', dpi=110)
    return base64.b64encode(data.getvalue()).decode('ascii')
