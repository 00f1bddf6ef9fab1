"""Averaging gradients: milliseconds a step of each way to do it, side by side in one run.

    python benchmarks/grad_sync.py --device cpu
    PJRT_DEVICE=CPU python benchmarks/grad_sync.py --device xla
    python benchmarks/grad_sync.py --hosts 2 --rate 1gbit --compression none bf16

The ways take turns, all but one in the same processes, so that a machine that slows down slows all
of them. A figure is the median over the rounds; ratios are what travels between machines.

- none: every rank trains for itself, the floor; on a lazy device in one execution a step.
- split: the same in two executions, cut where averaging has to cut, and waiting there until all
  ranks have their gradients, since there is no average before (lazy devices alone).
- stock: ``MMDistributedDataParallel`` as MMEngine's runner builds it, on the CPU, where it works.
  Its processes take turns with those of the other ways, because our ``init_device`` changes for a
  whole process how freed memory is kept. On the stand-in with a backend of its own (``--device
  native``) it is PyTorch's DDP, in the processes of the others.
- accelerate: the model as HF accelerate's ``prepare`` gives it, on the CPU, beside ``stock``.
- naive: PyTorch's DDP with a communication hook that copies each 1 MB bucket to the host, averages
  it and sends it back, as soon as it is ready; parameter by parameter on the card, where DDP
  refuses.
- ours: ``DeviceDistributedDataParallel`` with its defaults; ours-bf16 with compressed
  gradients.

The physical floor of a setting is the step that averages nothing, and one after the other the
copies from and to the device and 2·G·(N−1)/N bytes on the wire, with the bandwidth of copies and
of plain TCP streams measured in the same rounds, by all ranks at once. A lazy device cannot reach
it, because it has to be cut in two and cannot record the optimizer while the device computes:
beside it stands the floor with split in place of none.
Whatever hides communication behind backward, or sends less than all bits, or stays off loopback,
may go below it.

With ``--hosts`` the ranks run in network namespaces (see ``hosts.py``), which needs root.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, ContextManager, Dict, List, Optional

from floor import Floor, floor_of, wire_bytes
from hosts import Hosts, HostsError, available, run_ranks
from result_file import write_results

WAYS = ('none', 'split', 'stock', 'accelerate', 'naive', 'ours')
WORKER = Path(__file__).with_name('grad_ways.py')
#: How often processes of MMEngine's wrapper and accelerate take turns with the other ways'.
TURNS = 3


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', choices=('cpu', 'xla', 'card', 'native'), default='cpu')
    parser.add_argument('--ranks', type=int, nargs='+', default=[2, 4], help='on all hosts')
    parser.add_argument('--hosts', type=int, default=1, help='network namespaces; 1 for none')
    parser.add_argument('--rate', help="of each host's link, e.g. 1gbit; not limited without it")
    parser.add_argument(
        '--compression',
        nargs='+',
        choices=('none', 'bf16'),
        default=['none'],
        help='ours with each of these as well',
    )
    parser.add_argument('--layers', type=int, nargs='+', default=None)
    parser.add_argument('--width', type=int, default=None)
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--steps', type=int, default=5, help='steps in a round')
    parser.add_argument('--json', help='write the figures to this file')
    args = parser.parse_args()
    # Width 1024 and 12 layers are 50 MB of gradients.
    args.width = args.width or {'xla': 512}.get(args.device, 1024)
    args.layers = args.layers or {'xla': [8, 32]}.get(args.device, [8, 12, 32])
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.rate is not None and args.hosts == 1:
        parser.error(f'--rate {args.rate} limits links between hosts; give --hosts 2 or more')
    odd = [ranks for ranks in args.ranks if ranks % args.hosts]
    if odd:
        parser.error(f'--ranks {odd} cannot be shared out among {args.hosts} hosts evenly')
    if args.hosts > 1 and not available().possible:
        parser.error(f'--hosts {args.hosts}: {available().reason}')


def measure(args: argparse.Namespace, hosts: Optional[Hosts], ranks: int, layers: int) -> Any:
    """Measure one setting, on the CPU in several jobs; return rank 0's figures."""
    setting = dict(vars(args), ranks=ranks, layers=layers, stock=False)
    if args.device != 'cpu':
        return start(setting, hosts)
    setting['rounds'] = -(-args.rounds // TURNS)
    found, *others = [
        start(dict(setting, stock=stock), hosts) for _ in range(TURNS) for stock in (False, True)
    ]
    for other in others:
        for way, times in other['times'].items():
            found['times'].setdefault(way, []).extend(times)
    return found


def start(setting: Dict[str, Any], hosts: Optional[Hosts]) -> Any:
    """Run a job of one setting and return rank 0's figures."""
    ranks, layers = setting['ranks'], setting['layers']
    per_host = ranks // setting['hosts']
    environ = dict(
        GRAD_SYNC_WORKER=json.dumps(setting),
        PYTHONWARNINGS='ignore::FutureWarning',
        # Hosts in namespaces have no names, of which every connection would warn.
        TORCH_CPP_LOG_LEVEL='ERROR',
    )
    if setting['device'] == 'xla':
        environ['PJRT_DEVICE'] = os.environ.get('PJRT_DEVICE', 'CPU')
        environ['CPU_NUM_DEVICES'] = str(per_host)
    try:
        printed = run_ranks([sys.executable, str(WORKER)], per_host, hosts, environ)[0]
    except HostsError as error:
        raise SystemExit(f'{ranks} ranks, {layers} layers: {error}') from error
    return json.loads(printed.splitlines()[-1])


def head_line() -> str:
    heads = ''.join(f'{way:>11}' for way in WAYS)
    return (
        f'{"ranks":>5}{"layers":>7}{"MB":>6}{heads}{"ours/none":>11}{"ours/split":>11}'
        f'{"stock/ours":>11}{"naive/ours":>11}{"difference":>12}'
    )


def table_row(found: Dict[str, Any]) -> str:
    ms = found['median_ms']
    row = f'{found["ranks"]:5}{found["layers"]:7}{found["bytes"] / 2**20:6.0f}'
    row += ''.join(f'{ms[way]:11.1f}' if way in ms else f'{"-":>11}' for way in WAYS)
    row += f'{ms["ours"] / ms["none"]:11.2f}'
    row += f'{ms["ours"] / ms["split"]:11.2f}' if 'split' in ms else f'{"-":>11}'
    row += f'{ms["stock"] / ms["ours"]:11.2f}' if 'stock' in ms else f'{"-":>11}'
    return row + f'{ms["naive"] / ms["ours"]:11.2f}{found["difference"]:12.1e}'


def floor_lines(found: Dict[str, Any], hosts: int) -> List[str]:
    """The physical floor and how far from it each of our ways is."""
    floor, ms = Floor(**found['floor']), found['median_ms']
    parts = f'none {floor.compute:.1f}'
    if floor.to_host or floor.to_device:
        parts += f' + to host {floor.to_host:.1f} + to device {floor.to_device:.1f}'
    megabytes = wire_bytes(found['bytes'], found['ranks']) / 1e6
    parts += f' + wire {floor.wire:.1f} ({megabytes:.0f} MB at {found["wire_mb_s"]:.0f} MB/s)'
    lines = [f'      floor {floor.total:.1f} = {parts}']
    between = 1 < hosts < found['ranks']
    if between:
        lines[0] += f'; {floor.total_between_hosts:.1f} with the ranks of a host as one'
    cut = floor.total + ms.get('split', floor.compute) - floor.compute
    if 'split' in ms:
        lines[0] += f'; {cut:.1f} with split in place of none'
    for way in [way for way in ms if way.startswith('ours')]:
        line = f'      {way:<15}{ms[way]:10.1f}   {way}/floor {ms[way] / floor.total:.2f}'
        if between:
            line += f' and {ms[way] / floor.total_between_hosts:.2f}'
        if 'split' in ms:
            line += f', {ms[way] / cut:.2f} in two executions'
        if way != 'ours':
            line += f'   ours/{way} {ms["ours"] / ms[way]:.2f}'
        lines.append(line)
    return lines


def summarize(args: argparse.Namespace, found: Any, ranks: int, layers: int) -> Dict[str, Any]:
    ms = {name: statistics.median(values) for name, values in found['times'].items()}
    size = layers * (args.width + 1) * args.width * 4
    probes = {name: ms.pop(name, 0.0) for name in ('wire', 'to_host', 'to_device')}
    stream = found['stream_bytes']
    floor = floor_of({**ms, **probes}, size, args.hosts, ranks, stream)
    # floor's `none` is rank 0's, like the figures of the ways that it is compared with.
    setting = dict(ranks=ranks, layers=layers, hosts=args.hosts, rate=args.rate, bytes=size)
    setting['device'] = args.device
    wire_mb_s = stream / probes['wire'] / 1e3
    figures = dict(median_ms=ms, floor=floor._asdict(), floor_ms=floor.total)
    return dict(found, **setting, **figures, wire_mb_s=wire_mb_s)


def main() -> None:
    args = parse_args()
    where = f', {args.hosts} hosts at {args.rate or "any rate"}' if args.hosts > 1 else ''
    title = f'device {args.device}, width {args.width}, ms a step'
    print(f'{title}, median of {args.rounds} rounds{where}')
    print(head_line())
    results = []
    make: ContextManager = contextlib.nullcontext()
    if args.hosts > 1:
        make = Hosts(args.hosts, args.rate)
    with make as hosts:
        for ranks in args.ranks:
            for layers in args.layers:
                found = summarize(args, measure(args, hosts, ranks, layers), ranks, layers)
                print('\n'.join([table_row(found), *floor_lines(found, args.hosts)]), flush=True)
                results.append(found)
    if args.json:
        write_results(args.json, results)


if __name__ == '__main__':
    main()
