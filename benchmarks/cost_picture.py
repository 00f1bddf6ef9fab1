"""The picture of ``cost_model.py``: what was measured and fitted, and what is predicted."""

from typing import Any, Dict

from cost_fit import Cluster
from cost_pages import Analysis
from matplotlib.figure import Figure


def draw(analysis: Analysis, clusters: Dict[str, Cluster], path: str) -> None:
    """Draw measured points over fitted lines, and predictions to 1,000 hosts.

    Args:
        analysis (Analysis): The points and the fit.
        clusters (dict): By rate, what predictions are made for.
        path (str): A PNG file.
    """
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    _draw_fit(left, analysis)
    _draw_predictions(right, clusters)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def _draw_fit(axes: Any, analysis: Analysis) -> None:
    settings = list(dict.fromkeys((point.link, point.ranks) for point in analysis.points))
    links = list(dict.fromkeys(link for link, _ in settings))
    for link, ranks in settings:
        mine = [p for p in analysis.points if (p.link, p.ranks) == (link, ranks)]
        sizes = [point.size / 2**20 for point in mine]
        predicted = [analysis.model.predict(point) * 1e3 for point in mine]
        measured = [point.seconds * 1e3 for point in mine]
        color, marker = f'C{links.index(link)}', {2: 'o', 4: 's', 8: '^'}[ranks]
        axes.plot(sizes, predicted, color, linewidth=0.8)
        label = f'{link}, {ranks} ranks'
        axes.plot(sizes, measured, color + marker, markersize=4, label=label)
    axes.set(xscale='log', yscale='log', xlabel='MB', ylabel='ms', title='measured, and the fit')
    axes.set_ylim(top=axes.get_ylim()[1] * 10)  # room for the legend
    axes.legend(fontsize=6, ncol=3, loc='upper left')


def _draw_predictions(axes: Any, clusters: Dict[str, Cluster]) -> None:
    hosts = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    size = 100 * 4e6
    for number, (rate, cluster) in enumerate(clusters.items()):
        flat = [cluster.flat(size, count) for count in hosts]
        axes.plot(hosts, flat, f'C{number}--', label=f'{rate}, flat')
        layered = [cluster.hierarchical(size, count) for count in hosts]
        axes.plot(hosts, layered, f'C{number}', label=f'{rate}, hierarchical')
    axes.set(xscale='log', yscale='log', xlabel='hosts', ylabel='s to average')
    axes.set_title('predicted: 100 M parameters')
    axes.legend(fontsize=6)
