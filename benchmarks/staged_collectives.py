"""Sums of the backend ``staged`` beside gloo's: milliseconds of an all-reduce, by size and ranks.

    python benchmarks/staged_collectives.py --device cpu
    python benchmarks/staged_collectives.py --device card --ranks 2

The ways take turns in the same processes, so that a machine that slows down slows all of them. A
figure is the median over the rounds of the slowest rank; ratios are what travels between machines.

- gloo: its all-reduce; of a tensor of the card a copy to the host, that, and a copy back.
- staged: the backend as it is.
- messages, shared: the backend if it sent every sum over gloo, or added up every sum in memory
  that ranks share; where these meet the backend should change from one to the other.
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List

import torch
from grad_ways import CARD, CARDS
from hosts import run_ranks
from result_file import write_results
from torch import distributed as torch_dist

WAYS = ('gloo', 'staged', 'messages', 'shared')
#: From which size sums are in shared memory.
LEAST_BYTES = dict(messages=sys.maxsize, shared=1)
#: Bytes that a turn of small sums adds up, one sum after the other, but not more sums than 50.
TURN_BYTES = 4 << 20


def make_ways(on_card: bool) -> Dict[str, Callable[[torch.Tensor], None]]:
    """What each way calls, over a group of its own."""
    from mmdevplug.staged import reductions

    usual = reductions.LEAST_BYTES

    def make_way(way: str) -> Callable[[torch.Tensor], None]:
        group = torch_dist.new_group(backend='gloo' if way == 'gloo' else 'staged')

        def add_up(tensor: torch.Tensor) -> None:
            reductions.LEAST_BYTES = LEAST_BYTES.get(way, usual)
            torch_dist.all_reduce(tensor, group=group)

        def add_up_by_hand(tensor: torch.Tensor) -> None:
            host = tensor.cpu()
            add_up(host)
            tensor.copy_(host)

        return add_up_by_hand if on_card and way == 'gloo' else add_up

    return {way: make_way(way) for way in WAYS}


def work(settings: Dict[str, Any]) -> None:
    """Measure in this rank's process; rank 0 prints the figures."""
    torch.set_num_threads(1)
    device = torch.device('cpu')
    if settings['device'] == 'card':
        sys.path.insert(0, str(CARDS))
        import card

        card.install(CARD, count=16)
        device = torch.device(CARD, int(os.environ['LOCAL_RANK']))
    torch_dist.init_process_group('gloo')
    ways = make_ways(device.type != 'cpu')
    found = []
    for size in settings['sizes']:
        tensor = torch.zeros(size // 4, device=device)
        count = max(1, min(50, TURN_BYTES // size))
        times: Dict[str, List[float]] = {way: [] for way in ways}
        for number in range(settings['rounds'] + 1):  # the first is for warming up
            for way, add_up in ways.items():
                torch_dist.barrier()
                begin = time.perf_counter()
                for _ in range(count):
                    add_up(tensor)
                spent = torch.tensor([(time.perf_counter() - begin) / count * 1e3])
                torch_dist.all_reduce(spent, torch_dist.ReduceOp.MAX)
                if number:
                    times[way].append(spent.item())
        found.append(dict(bytes=size, times=times))
    if torch_dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch_dist.barrier()
    torch_dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', choices=('cpu', 'card'), default='cpu')
    parser.add_argument('--ranks', type=int, nargs='+', default=[2, 4, 8])
    parser.add_argument('--kilobytes', type=int, nargs='+', default=[4**k for k in range(10)])
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--json', help='write the figures to this file')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    settings = dict(vars(args), sizes=[each << 10 for each in args.kilobytes])
    rows = []
    print(f'{"ranks":>5}{"KB":>8}{"gloo ms":>10}' + ''.join(f'{way:>10}' for way in WAYS[1:]))
    for ranks in args.ranks:
        environ = dict(STAGED_COLLECTIVES=json.dumps(settings), TORCH_CPP_LOG_LEVEL='ERROR')
        printed = run_ranks([sys.executable, __file__], ranks, environ=environ)[0]
        for row in json.loads(printed.splitlines()[-1]):
            ms = {way: statistics.median(times) for way, times in row['times'].items()}
            ratios = ''.join(f'{ms[way] / ms["gloo"]:10.2f}' for way in WAYS[1:])
            print(f'{ranks:5}{row["bytes"] >> 10:8}{ms["gloo"]:10.3f}{ratios}', flush=True)
            rows.append(dict(ranks=ranks, median_ms=ms, **row))
    if args.json:
        write_results(args.json, rows, device=args.device)


if __name__ == '__main__':
    work(
        json.loads(os.environ['STAGED_COLLECTIVES'])
    ) if 'STAGED_COLLECTIVES' in os.environ else main()
