"""A cost model of gloo's all-reduce: measured, fitted, checked, and carried on to 1,000 hosts.

    python benchmarks/cost_model.py --json work_dirs/cost_model.json --update-docs
    python benchmarks/cost_model.py --json work_dirs/cost_model.json --reuse --latency-us 30

It times all-reduces of many sizes between 2, 4 and 8 ranks, over loopback and over limited links
between network namespaces (see ``hosts.py``; that needs root), fits latency and bandwidth (see
``cost_fit.py``), and compares the fit with what it has not seen. ``--update-docs`` writes the
tables and the picture of ``docs/*/cost_model.md``.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, ContextManager, Dict, List, NamedTuple, Optional, Sequence

from cost_fit import (
    LOOPBACK,
    Cluster,
    Point,
    errors_by_link,
    fit,
    held_out_errors,
    ring_bytes,
    textbook_errors,
)
from cost_pages import PICTURE, WORDS, Analysis, make_blocks, print_report, update_page
from hosts import Hosts, available, bits_per_second, run_ranks

RANK = Path(__file__).with_name('cost_rank.py')
SIZES = [1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
#: These are left out of the fit, and predicted.
HELD_OUT = (64 << 10, 4 << 20)
RATES = ('200mbit', '1gbit')


class Setting(NamedTuple):
    """Where all-reduces are timed: so many ranks on each of so many hosts.

    Attributes:
        rate (str, optional): Of each host's link; None for loopback on this machine.
    """

    rate: Optional[str]
    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


SETTINGS = [Setting(None, 1, ranks) for ranks in (2, 4, 8)] + [
    Setting(rate, hosts, ranks) for rate in RATES for hosts, ranks in ((2, 1), (4, 1), (4, 2))
]
#: For the growth with the number of ranks of what does not depend on the size.
SMALL_RANKS = (2, 3, 4, 6, 8, 12, 16)
SMALL_SIZE = 1 << 10
START_RANKS = (2, 4, 8, 16)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--json', default='work_dirs/cost_model.json', help='the measurements')
    parser.add_argument('--reuse', action='store_true', help='read them instead of measuring')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--largest', type=int, default=max(SIZES), help='bytes of a message')
    parser.add_argument('--latency-us', type=float, help='of a message, instead of the fitted one')
    parser.add_argument('--ranks-per-host', type=int, default=8, help='in the predictions')
    parser.add_argument('--bucket-mb', type=float, default=8, help='in the predictions')
    parser.add_argument('--update-docs', action='store_true')
    return parser.parse_args()


def measure(args: argparse.Namespace) -> Dict[str, Any]:
    """Measure everything."""
    possible, reason = available()
    if not possible:
        raise SystemExit(f'no limited links here: {reason}')
    sizes = [size for size in SIZES if size <= args.largest]
    found: Dict[str, Any] = dict(
        torch=metadata.version('torch'), cores=len(os.sched_getaffinity(0)), all_reduce=[]
    )
    for setting in SETTINGS:
        measured = run(setting, sizes, args.rounds)
        found['all_reduce'].append(dict(setting._asdict(), points=measured['points']))
        print(f'{setting}: measured', file=sys.stderr)
    found['small'] = [
        dict(ranks=ranks, **run(Setting(None, 1, ranks), [SMALL_SIZE], args.rounds)['points'][0])
        for ranks in SMALL_RANKS
    ]
    found['start'] = [
        dict(ranks=ranks, lazy=lazy, **run(Setting(None, 1, ranks), [], 0, lazy)['start'])
        for lazy in (False, True)
        for ranks in START_RANKS
    ]
    return found


def run(setting: Setting, sizes: Sequence[int], rounds: int, lazy: bool = False) -> Any:
    """Time all-reduces in one setting."""
    environ = dict(
        COST_SETTINGS=json.dumps(dict(sizes=list(sizes), rounds=rounds)),
        TORCH_CPP_LOG_LEVEL='ERROR',
        TORCH_GLOO_LAZY_INIT=str(int(lazy)),
    )
    make: ContextManager = contextlib.nullcontext()
    if setting.rate is not None:
        make = Hosts(setting.hosts, setting.rate)
    with make as hosts:
        printed = run_ranks([sys.executable, str(RANK)], setting.ranks_per_host, hosts, environ)
    return json.loads(printed[0].splitlines()[-1])


def measured_points(found: Dict[str, Any]) -> List[Point]:
    """The measured points of all links."""
    points = []
    for setting in found['all_reduce']:
        ranks = setting['hosts'] * setting['ranks_per_host']
        crowding = max(1.0, ranks / found['cores'])
        link = setting['rate'] or LOOPBACK
        points += [
            Point(link, ranks, point['size'], point['seconds'], crowding)
            for point in setting['points']
        ]
    return points


def analyse(found: Dict[str, Any], latency: Optional[float] = None) -> Analysis:
    """Fit the model and check it."""
    points = measured_points(found)
    nominal = {
        setting['rate']: 8 / bits_per_second(setting['rate'])
        for setting in found['all_reduce']
        if setting['rate'] is not None
    }
    model = fit(points, nominal)
    errors = {
        'all points': errors_by_link(model.predict, points),
        '64 KB and 4 MB held out': held_out_errors(points, nominal, _of_held_out_size),
        # A fit to fewer ranks, carried on to twice as many: what predictions do, in small.
        '8 ranks held out': held_out_errors(points, nominal, lambda point: point.ranks == 8),
        'textbook': textbook_errors(points),
    }
    efficiency = {link: nominal[link] / byte for link, byte in model.links.items()}
    latency = model.latency if latency is None else latency
    return Analysis(points, model, errors, efficiency, latency, ring_ratio(found))


def _of_held_out_size(point: Point) -> bool:
    return point.size in HELD_OUT


def ring_ratio(found: Dict[str, Any]) -> float:
    """Bytes that a host sent over those of the ring, for the largest messages; the median."""
    ratios = []
    for setting in found['all_reduce']:
        if setting['rate'] is not None:
            largest = max(setting['points'], key=lambda point: point['size'])
            ranks = setting['hosts'] * setting['ranks_per_host']
            ratios.append(largest['host_sent'] / ring_bytes(largest['size'], ranks))
    return statistics.median(ratios)


def cluster(analysis: Analysis, rate: str, args: argparse.Namespace) -> Cluster:
    """A cluster whose hosts have links of a rate, each rank a core of its own."""
    efficiency = statistics.mean(analysis.efficiency.values())
    return Cluster(
        analysis.latency,
        analysis.model.constant,
        8 / bits_per_second(rate) / efficiency,
        analysis.model.byte,
        args.ranks_per_host,
        int(args.bucket_mb * 2**20),
    )


def main() -> None:
    args = parse_args()
    path = Path(args.json)
    if args.reuse:
        found = json.loads(path.read_text(encoding='utf-8'))
    else:
        found = measure(args)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1), encoding='utf-8')
    latency = None if args.latency_us is None else args.latency_us * 1e-6
    analysis = analyse(found, latency)
    clusters = {rate: cluster(analysis, rate, args) for rate in ('1gbit', '10gbit', '100gbit')}
    for language in WORDS if args.update_docs else ():
        update_page(language, make_blocks(found, analysis, clusters, language))
    if args.update_docs:
        # Its library is not needed for the figures.
        from cost_picture import draw

        draw(analysis, clusters, str(PICTURE))
    print_report(make_blocks(found, analysis, clusters, 'en'))


if __name__ == '__main__':
    main()
