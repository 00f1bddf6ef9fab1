"""Exchanging samples between ranks: milliseconds and bytes of each way, side by side in one run.

    python benchmarks/exchange.py
    PJRT_DEVICE=CPU python benchmarks/exchange.py --device xla --ranks 2

Every rank holds samples: dicts of a float32 tensor ``x`` on its device and a number ``reward``. At
the end each has stacked on its own device

- gather: the samples of all ranks, the pool;
- balance: its share of the pool, as long as every other's and in the order of ranks.

The ways take turns in the same processes:

- object: ``all_gather_object`` of the samples, ``.to(device)`` of each tensor, ``torch.stack``;
- flat: counts first, then one all-gather of one float32 tensor, padded to the fullest rank. It is
  what one writes by hand who knows the names, shapes and types of all that the samples hold.
- ours: ``gather_samples`` with ``stacked``, or ``balance_samples`` and ``stack_samples``, which
  know nothing.

A pool is even, each rank with the same number of samples, or skewed: each rank with twice as many
as the next. A figure in ms is the median over the rounds of the slowest rank's time; ratios are
what travels between machines. All results are compared bit by bit with what they should be.

Where root is available every rank runs on a host of its own (a network namespace, see
``hosts.py``), and the bytes are what the interfaces of all of them sent in an exchange, TCP's
headers and acknowledgements included, less what is sent around no exchange at all. With
``--loopback``, or without root, the counter of the loopback interface serves: whatever else the
machine sends to itself is in it. ``needed`` are the bytes of samples that are somewhere else after
the exchange, 4 for each float of ``x`` and 8 for ``reward``.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence

from hosts import Hosts, HostsError, available, run_ranks
from result_file import write_results

EXCHANGES = ('gather', 'balance')
POOLS = ('even', 'skewed')
WAYS = ('object', 'flat', 'ours')
WORKER = Path(__file__).with_name('exchange_ways.py')
#: By the bytes of a sample, the shape of its ``x``.
SHAPES = {4: [1], 1 << 10: [256], 64 << 10: [128, 128], 602112: [3, 224, 224]}
REWARD_BYTES = 8
#: What pickle adds to a tensor.
PICKLED_BYTES = 600
#: Below this, headers and counts are more than the samples.
LARGE_POOL = 1 << 20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', choices=('cpu', 'xla', 'card'), default='cpu')
    parser.add_argument('--ranks', type=int, nargs='+', default=[2, 4, 8])
    parser.add_argument('--samples', type=int, nargs='+', default=[1, 16, 128, 1024])
    parser.add_argument(
        '--bytes', type=int, nargs='+', choices=sorted(SHAPES), default=list(SHAPES)
    )
    names = ('gather', 'balance')
    parser.add_argument('--exchange', nargs='+', choices=names, default=list(names))
    parser.add_argument(
        '--pool', nargs='+', choices=('even', 'skewed'), default=['even', 'skewed']
    )
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=list(WAYS))
    parser.add_argument('--memory', type=float, default=3.0, help='GB that a setting may need')
    parser.add_argument('--loopback', action='store_true', help='no hosts in network namespaces')
    parser.add_argument('--rate', help="of each host's link, e.g. 1gbit; not limited without it")
    parser.add_argument('--json', help='write the figures to this file')
    args = parser.parse_args()
    if not args.loopback and not available().possible:
        print(f'no hosts in network namespaces: {available().reason}; over loopback instead')
        args.loopback = True
    if args.rate is not None and args.loopback:
        parser.error(f'--rate {args.rate} limits links between hosts, and there are none')
    return args


def counts(pool: str, ranks: int, samples: int) -> List[int]:
    """How many samples each rank holds, the same in all for either kind of pool."""
    total = ranks * samples
    if pool == 'even':
        return [samples] * ranks
    whole = 2**ranks - 1
    ends = [math.ceil(total * (whole + 1 - 2 ** (ranks - r)) / whole) for r in range(ranks + 1)]
    return [end - start for start, end in zip(ends, ends[1:])]


def needed(exchange: str, held: Sequence[int], size: int) -> int:
    """The bytes that must change rank."""
    ranks, total = len(held), sum(held)
    if exchange == 'gather':
        return (ranks - 1) * total * size
    share, start, stay = total // ranks, 0, 0
    for rank, count in enumerate(held):
        both = min(start + count, (rank + 1) * share) - max(start, rank * share)
        stay += max(both, 0)
        start += count
    return (total - stay) * size


def memory(held: Sequence[int], size: int) -> int:
    """About what all ranks need together for the way that needs most, all_gather_object."""
    size += PICKLED_BYTES
    ranks, total, largest = len(held), sum(held), max(held)
    # Pickled, padded and unpickled; what came from all, padded; the pool and the stacked pool.
    return (total + ranks * (4 * largest + ranks * largest + 2 * total)) * size


def settings(args: argparse.Namespace, ranks: int) -> Iterator[Dict[str, Any]]:
    for exchange in args.exchange:
        for pool in args.pool:
            for size in args.bytes:
                for samples in args.samples:
                    held = counts(pool, ranks, samples)
                    yield dict(
                        exchange=exchange,
                        pool=pool,
                        ranks=ranks,
                        samples=samples,
                        bytes=size,
                        shape=SHAPES[size],
                        held=held,
                        needed=needed(exchange, held, size + REWARD_BYTES),
                        memory=memory(held, size),
                        ways=args.ways,
                    )


def run(
    args: argparse.Namespace,
    hosts: Optional[Hosts],
    todo: Sequence[Dict[str, Any]],
    tell: Callable[[Dict[str, Any]], None],
) -> None:
    """Measure settings in the same processes, and tell what was found as soon as it is."""
    ranks = todo[0]['ranks']
    noise = max(math.prod(one['shape']) + sum(one['held']) for one in todo)
    with tempfile.TemporaryDirectory() as folder:
        told, found = Path(folder, 'settings.json'), Path(folder, 'found')
        told.write_text(json.dumps(dict(device=args.device, noise=noise, settings=todo)))
        environ = dict(
            EXCHANGE_SETTINGS=str(told),
            EXCHANGE_FOUND=str(found),
            EXCHANGE_HOSTS='0' if hosts is None else str(hosts.count),
            PYTHONWARNINGS='ignore::FutureWarning',
            # Hosts in namespaces have no names, of which every connection would warn.
            TORCH_CPP_LOG_LEVEL='ERROR',
        )
        per_host = ranks if hosts is None else 1
        if args.device == 'xla':
            environ['PJRT_DEVICE'] = os.environ.get('PJRT_DEVICE', 'CPU')
            environ['CPU_NUM_DEVICES'] = str(per_host)
        with lines_of(found, lambda line: tell(json.loads(line))):
            try:
                run_ranks([sys.executable, str(WORKER)], per_host, hosts, environ)
            except HostsError as error:
                raise SystemExit(f'{ranks} ranks: {error}') from error


@contextlib.contextmanager
def lines_of(path: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell each line of a file that others write, until the ``with`` statement is left."""
    path.touch()
    ended = threading.Event()

    def follow() -> None:
        with path.open() as file:
            while not ended.wait(0.2):
                for line in file:
                    tell(line)
            for line in file:
                tell(line)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def head_line() -> str:
    times = ''.join(f'{way:>10}' for way in WAYS)
    sent = ''.join(f'{way:>10}' for way in ('object', 'flat', 'ours', 'needed'))
    return (
        f'{"":25}{"ms":>22}{"":42}{"KB sent by all":>24}\n'
        f'{"exchange":9}{"pool":7}{"ranks":>5}{"samples":>8}{"bytes":>8}{times}'
        f'{"object/ours":>13}{"flat/ours":>11}{sent}{"ours/needed":>13}  equal'
    )


def label(setting: Dict[str, Any]) -> str:
    return (
        f'{setting["exchange"]:9}{setting["pool"]:7}{setting["ranks"]:5}{setting["samples"]:8}'
        f'{setting["bytes"]:8}'
    )


def ratio(found: Dict[str, Any], way: str) -> float:
    """How many times as long as ours a way takes."""
    ms = found['ms']
    return ms[way] / ms['ours'] if {way, 'ours'} <= set(ms) else math.nan


def excess(found: Dict[str, Any]) -> float:
    """What we send for each byte that must be sent."""
    return found['sent'].get('ours', math.nan) / (found['needed'] or math.nan)


def table_row(found: Dict[str, Any]) -> str:
    row = label(found)
    row += ''.join(f'{found["ms"].get(way, math.nan):10.2f}' for way in WAYS)
    row += f'{ratio(found, "object"):13.1f}{ratio(found, "flat"):11.2f}'
    row += ''.join(f'{found["sent"].get(way, math.nan) / 1e3:10.1f}' for way in WAYS)
    row += f'{found["needed"] / 1e3:10.1f}{excess(found):13.2f}'
    return row + ('  yes' if not found['wrong'] else f'  NO: {", ".join(found["wrong"])}')


def target_lines(results: Sequence[Dict[str, Any]]) -> Iterator[str]:
    """What was aimed at, and whether it was reached."""
    for least, sizes, fits in (
        (5, '<= 1 KB', lambda size: size <= 1 << 10),
        (3, '>= 64 KB', lambda size: size >= 64 << 10),
    ):
        for exchange, pool in itertools.product(EXCHANGES, POOLS):
            mine = [
                one
                for one in results
                if (one['exchange'], one['pool']) == (exchange, pool) and fits(one['bytes'])
            ]
            target = f'{exchange}, {pool} pool, samples {sizes}: object/ours >= {least}'
            yield _judged(target, mine, lambda one: ratio(one, 'object'), least, min)
    moving = [
        one
        for one in results
        if one['exchange'] == 'balance' and one['needed'] >= LARGE_POOL and 'ours' in one['sent']
    ]
    target = f'balance, {LARGE_POOL >> 20} MB or more to move: ours/needed <= 1.1'
    yield _judged(target, moving, excess, 1.1, max)
    wrong = [one for one in results if one['wrong']]
    yield f'equal, bit by bit: {"met" if not wrong else f"NOT MET in {len(wrong)}"}'


def _judged(
    target: str,
    results: Sequence[Dict[str, Any]],
    figure: Callable[[Dict[str, Any]], float],
    bound: float,
    worst: Callable,
) -> str:
    if not results:
        return f'{target}: nothing measured'
    met = sum(worst(figure(one), bound) == bound for one in results)
    found = worst(results, key=figure)
    verdict = 'met' if met == len(results) else 'NOT MET everywhere'
    return (
        f'{target}: {verdict}; holds in {met} of {len(results)} settings, worst '
        f'{figure(found):.2f} ({found["ranks"]} ranks, {found["samples"]} samples of '
        f'{found["bytes"]} bytes)'
    )


def main() -> None:
    args = parse_args()
    where = 'over loopback' if args.loopback else 'each rank on a host of its own'
    where += f' at {args.rate}' if args.rate else ''
    print(f'device {args.device}, {where}; medians')
    print(head_line())
    results: List[Dict[str, Any]] = []

    def tell(found: Dict[str, Any]) -> None:
        results.append(found)
        print(table_row(found), flush=True)

    for ranks in args.ranks:
        todo = []
        for setting in settings(args, ranks):
            if setting['memory'] > args.memory * 1e9:
                print(f'{label(setting)}   left out: {setting["memory"] / 1e9:.1f} GB of memory')
            else:
                todo.append(setting)
        make: ContextManager = (
            contextlib.nullcontext() if args.loopback else Hosts(ranks, args.rate)
        )
        with make as hosts:
            run(args, hosts, todo, tell)
    print('\n'.join(target_lines(results)))
    if args.json:
        write_results(args.json, results)


if __name__ == '__main__':
    main()
