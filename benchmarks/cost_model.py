"""Compare a formula for gloo's all-reduce with measured all-reduces and training iterations.

    python benchmarks/cost_model.py
    python benchmarks/cost_model.py --ranks 2 3 4 --rates 200mbit 1gbit

For N ranks and a message of S bytes, with the time in seconds::

    T = max(core, link)
    core = (a * 2 (N - 1)  +  b * 2 S (N - 1) / N) * k  +  c
    link = d * 2 S (N - 1) / N

``docs/en/cost_model.md`` explains the terms. a, b and c are fitted to all-reduces over loopback,
those of the largest number of ranks left out; d follows from the rate of the link. All other rows
of the table are predictions: more ranks, limited links between network namespaces (``hosts.py``;
root and iproute2), and iterations of PyTorch's DDP, whose buckets follow each other.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Sequence

import numpy
import torch
from hosts import Hosts, bits_per_second, run_ranks
from torch import distributed as torch_dist, nn

SIZES = [1 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20]
#: Weights that an iteration averages: 1,024 x 2,048 floats each, one in each bucket.
BUCKETS, BUCKET_BYTES = 4, 8 << 20
#: Data in an Ethernet frame.
FRAME_BYTES, DATA_BYTES = 1514, 1448
#: Short calls are repeated until a round takes about this long in seconds, at most so often.
ROUND_SECONDS, MOST_REPEATS = 0.05, 40


class Point(NamedTuple):
    """A measured all-reduce, or an iteration with several.

    Attributes:
        rate (str, optional): Of each rank's link; None for loopback.
        ranks (int): N.
        messages (int): All-reduces, one after the other.
        size (int): S in bytes, of each.
        seconds (float): What was measured.
        computing (float): What the same iteration takes without averaging.
    """

    rate: Optional[str]
    ranks: int
    messages: int
    size: int
    seconds: float
    computing: float

    def columns(self) -> List[float]:
        """What a, b and c are multiplied with."""
        crowding = max(1.0, self.ranks / len(os.sched_getaffinity(0)))
        return [2 * (self.ranks - 1) * crowding, self.ring_bytes() * crowding, 1.0]

    def ring_bytes(self) -> float:
        """Bytes that a rank sends."""
        return 2 * self.size * (self.ranks - 1) / self.ranks

    def predict(self, terms: Sequence[float]) -> float:
        """Seconds by the formula; ``seconds`` is not looked at."""
        link = 0.0
        if self.rate is not None:
            byte = 8 / bits_per_second(self.rate) * FRAME_BYTES / DATA_BYTES
            link = byte * self.ring_bytes()
        core = float(numpy.dot(self.columns(), terms))
        return self.computing + self.messages * max(core, link)


def fit(points: Sequence[Point]) -> List[float]:
    """Fit a, b and c, none of them negative, with the least squares of relative errors."""
    seconds = numpy.array([point.seconds for point in points])
    matrix = numpy.array([point.columns() for point in points]) / seconds[:, None]
    # Columns of very different sizes are scaled to one before they are solved.
    scale = matrix.max(axis=0)
    terms, kept = numpy.zeros(3), [0, 1, 2]
    while True:
        found = numpy.linalg.lstsq((matrix / scale)[:, kept], numpy.ones(len(points)), None)[0]
        if (found >= 0).all():
            terms[kept] = found
            return list(terms / scale)
        kept.pop(int(found.argmin()))


def measure(rate: Optional[str], ranks: int, args: argparse.Namespace) -> List[Point]:
    """Time everything with one rank on each host, or with all ranks on this machine."""
    command = [sys.executable, __file__, '--worker', f'--rounds={args.rounds}']
    command += [f'--largest={args.largest}']
    make: ContextManager = contextlib.nullcontext() if rate is None else Hosts(ranks, rate)
    with make as hosts:
        quiet = dict(TORCH_CPP_LOG_LEVEL='ERROR')
        printed = run_ranks(command, ranks if hosts is None else 1, hosts, quiet)
    found = json.loads(printed[0].splitlines()[-1])
    iteration, computing = found.pop('iteration'), found.pop('computing')
    points = [Point(rate, ranks, 1, int(size), spent, 0.0) for size, spent in found.items()]
    print(f'{ranks} ranks, {rate or "loopback"}: measured', file=sys.stderr)
    return [*points, Point(rate, ranks, BUCKETS, BUCKET_BYTES, iteration, computing)]


def work(args: argparse.Namespace) -> None:
    """Time calls in this rank; rank 0 prints the medians."""
    torch.set_num_threads(1)
    torch_dist.init_process_group('gloo')
    calls: Dict[Any, Callable[[], Any]] = dict(iterations())
    for size in (size for size in SIZES if size <= args.largest):
        calls[size] = functools.partial(torch_dist.all_reduce, torch.zeros(size // 4))
    repeats = {}
    for name, call in calls.items():
        call()  # the first allocates, and DDP builds its buckets anew
        repeats[name] = min(MOST_REPEATS, 1 + int(ROUND_SECONDS / time_call(call, 2)))
    times: Dict[Any, List[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            times[name].append(time_call(call, repeats[name]))
    if torch_dist.get_rank() == 0:
        medians = {name: statistics.median(found) for name, found in times.items()}
        print(json.dumps(medians), flush=True)
    torch_dist.barrier()
    torch_dist.destroy_process_group()


def iterations() -> Dict[str, Callable[[], Any]]:
    """Make a training iteration, and the same without averaging."""
    shapes = [(1024, 2048), (2048, 1024)] * (BUCKETS // 2)
    layers = [nn.Linear(*shape, bias=False) for shape in shapes]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=BUCKET_BYTES >> 20, gradient_as_bucket_view=True
    )
    batch = torch.ones(1, 1024)

    def iteration() -> None:
        model(batch).sum().backward()

    def computing() -> None:
        with model.no_sync():
            iteration()

    return dict(iteration=iteration, computing=computing)


def time_call(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of one call on the slowest rank."""
    torch_dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    slowest = torch.tensor([(time.perf_counter() - begin) / repeats], dtype=torch.float64)
    torch_dist.all_reduce(slowest, op=torch_dist.ReduceOp.MAX)
    return slowest.item()


def print_table(points: Sequence[Point], fitted: Sequence[Point], terms: Sequence[float]) -> None:
    """Print the terms, and each point beside its prediction, as Markdown."""
    a, b, c = terms
    print(f'\na = {a * 1e6:.0f} µs, b = {b * 1e9:.2f} ns, c = {c * 1e6:.0f} µs\n')
    print('| link | ranks | what | measured, ms | formula, ms | error | in the fit |')
    print('| --- | --- | --- | --- | --- | --- | --- |')
    for point in points:
        what = f'{point.size >> 10:,} KB'
        if point.messages > 1:
            what = f'iteration: {point.messages} x {what}, {point.computing * 1e3:.1f} computing'
        predicted = point.predict(terms)
        row = [point.rate or 'loopback', str(point.ranks), what, f'{point.seconds * 1e3:.2f}']
        row += [f'{predicted * 1e3:.2f}', f'{predicted / point.seconds - 1:+.0%}']
        print(f'| {" | ".join([*row, "yes" if point in fitted else "no"])} |')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--ranks', type=int, nargs='+', default=[2, 3, 4, 8], help='from 2 on')
    parser.add_argument('--rates', nargs='*', default=[], help='of links besides loopback')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--largest', type=int, default=max(SIZES), help='bytes of a message')
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if len(set(args.ranks)) < 3 or min(args.ranks) < 2:
        parser.error('--ranks: expected three different numbers from 2 on, or more.')
    points = [
        p for rate in [None, *args.rates] for n in args.ranks for p in measure(rate, n, args)
    ]
    fitted = [
        p for p in points if p.rate is None and p.messages == 1 and p.ranks < max(args.ranks)
    ]
    print_table(points, fitted, fit(fitted))


if __name__ == '__main__':
    main()
