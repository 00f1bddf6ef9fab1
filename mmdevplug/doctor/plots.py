"""Pictures of the report."""

import base64
import io
from typing import Any, Dict, Optional

from matplotlib import cm
from matplotlib.figure import Figure

from .report import headings, sizes_of


def plot_collectives(results: Dict[str, Any]) -> Optional[str]:
    """Draw time and bandwidth over the size of messages.

    Args:
        results (dict): Of the test of collectives.

    Returns:
        str, optional: A PNG as base64; None if nothing was timed with several sizes.
    """
    sized = [c for c in results['checks'] if len(c['points']) > 1 and c['points'][0]['bytes']]
    if not sized:
        return None
    figure = Figure(figsize=(11, 4.2))
    time_axes, rate_axes = figure.subplots(1, 2)
    markers = 'os^vDPX*<>ph'
    for number, check in enumerate(sized):
        colour = cm.tab20.colors[number % 20]
        sizes = [point['bytes'] for point in check['points']]
        seconds = [point['seconds'] for point in check['points']]
        look = dict(marker=markers[number % len(markers)], markersize=4, color=colour)
        time_axes.plot(sizes, [1e3 * s for s in seconds], label=check['name'], **look)
        rate_axes.plot(sizes, [b / s / 1e6 for b, s in zip(sizes, seconds)], **look)
    for axes, label in ((time_axes, 'milliseconds'), (rate_axes, 'MB/s')):
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        axes.set_xticks(sizes_of(results), headings(sizes_of(results))[1:])
        axes.set_xlabel('bytes that a rank puts in')
        axes.set_ylabel(label)
        axes.grid(True, which='major', alpha=0.3)
        for side in ('top', 'right'):
            axes.spines[side].set_visible(False)
    time_axes.set_title('time of the slowest rank, median')
    rate_axes.set_title('bandwidth')
    figure.legend(loc='center right', fontsize='small', frameon=False)
    figure.tight_layout(rect=(0, 0, 0.82, 1))
    return as_base64(figure)


def plot_memory(parts: Dict[str, float], total: Optional[float]) -> str:
    """Draw what a device has to hold.

    Args:
        parts (dict): Names and bytes.
        total (float, optional): The memory of the device.

    Returns:
        str: A PNG as base64.
    """
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
    for side in ('top', 'right', 'left'):
        axes.spines[side].set_visible(False)
    axes.legend(
        ncol=5, fontsize='small', frameon=False, loc='lower center', bbox_to_anchor=(0.5, 1)
    )
    figure.tight_layout()
    return as_base64(figure)


def as_base64(figure: Figure) -> str:
    """A figure as the text of a PNG."""
    data = io.BytesIO()
    figure.savefig(data, format='png', dpi=110)
    return base64.b64encode(data.getvalue()).decode('ascii')
