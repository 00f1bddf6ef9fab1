"""The picture of ``grad_sync.py``: a group of bars for each setting, its floor marked."""

from typing import Any, Dict, List, Sequence

from floor import Floor
from matplotlib.figure import Figure


def draw(results: Sequence[Dict[str, Any]], title: str, path: str) -> None:
    """Draw the medians.

    Args:
        results (Sequence[dict]): What ``grad_sync.py`` writes to its JSON file.
        title (str): Device and hosts.
        path (str): A PNG file.
    """
    ways: List[str] = []
    for found in results:
        ways += [way for way in found['median_ms'] if way not in ways]
    width = 0.8 / len(ways)
    size = (max(6.0, 2.4 + 0.32 * len(ways) * len(results)), 4.0)
    figure = Figure(figsize=size)
    axes = figure.subplots()
    for place, way in enumerate(ways):
        at = [i - 0.4 + (place + 0.5) * width for i in range(len(results))]
        heights = [found['median_ms'].get(way, 0.0) for found in results]
        axes.bar(at, heights, width, label=way)
    for index, found in enumerate(results):
        label = 'physical floor' if index == 0 else None
        floor = Floor(**found['floor']).total
        axes.hlines(floor, index - 0.42, index + 0.42, 'black', 'dashed', label=label)
    axes.set_xticks(range(len(results)))
    axes.set_xticklabels(
        [f'{found["ranks"]} ranks\n{found["bytes"] / 2**20:.0f} MB' for found in results]
    )
    axes.set_ylabel('ms a step')
    axes.set_title(title)
    axes.legend(fontsize='small', loc='center left', bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=90)
