"""How even device maps are: HF accelerate's, ours, and the best there is.

Models are built from their configs, without weights, and no device is needed. For each model and
number of devices the largest load relative to its ideal is compared, less 1: 0.09 says that the
fullest device holds 9 % more than its share. Devices are equal, or have memory as 2:1:2:1:...,
twice what the model needs in all. *best* is found by a table over all prefixes of
the blocks and all devices, which shares no code with the search.

python benchmarks/placement.py [--models 'GPT-2 XL'] [--blocks 1000] [--rounds 7] [--json FILE]
"""

import argparse
import functools
import gc
import importlib.util
import re
import statistics
import sys
import time
from statistics import pvariance
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
from placement_models import MODELS, chain
from placement_tables import COUNTS, tables
from result_file import write_results
from torch import nn

from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import DevicePlan, module_sizes, plan
from mmdevplug.model_parallel.device_plan import imbalance
from mmdevplug.model_parallel.partition import Partition
from mmdevplug.model_parallel.units import find_units, group_units, shared_names
from mmdevplug.model_parallel.unsplittable import WholeModules

#: What the memory of all devices is, in sizes of the model, where it is unequal.
ROOM = 2.0


def block_sizes(model: nn.Module) -> List[int]:
    """Bytes of what is put on a device as one, in order."""
    units = find_units(model, WholeModules(model))
    return [group.bytes for group in group_units(units, module_sizes(model), shared_names(model))]


def best_bottleneck(sizes: Sequence[int], weights: Sequence[float]) -> float:
    """The least largest load relative to its ideal, by a table over prefixes and devices."""
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(float)
    reached = np.full(len(ends), np.inf)
    reached[0] = 0.0
    for weight in weights:
        loads = (ends[None, :] - ends[:, None]) / weight
        loads[np.tril_indices(len(ends))] = np.inf  # no device stays empty
        reached = np.maximum(reached[:, None], loads).min(axis=0)
    return float(reached[-1] * sum(weights) / ends[-1])


def memory_of(count: int, total: int, equal: bool) -> Optional[Dict[int, int]]:
    """Capacities of so many devices for a model of so many bytes."""
    if equal:
        return None
    weights = [2 - place % 2 for place in range(count)]
    return {i: int(ROOM * total * weight / sum(weights)) for i, weight in enumerate(weights)}


def compare(name: str, model: nn.Module, count: int, equal: bool) -> Dict[str, Any]:
    """One row."""
    sizes = block_sizes(model)
    memory = memory_of(count, sum(sizes), equal)
    devices = f'xla:0-{count - 1}'
    weights = [1.0] * count if memory is None else [float(size) for size in memory.values()]
    row: Dict[str, Any] = dict(model=name, devices=count, equal=equal)
    try:
        theirs = plan(model, devices, 'auto', max_memory=memory, force_balance=False)
        row['accelerate'], row['accelerate imbalance'] = theirs.bottleneck - 1, theirs.imbalance
    except PlacementError as error:
        row['accelerate'], row['refusal'] = None, str(error)
    ours = plan(model, devices, max_memory=memory)
    row['ours'], row['imbalance'] = ours.bottleneck - 1, ours.imbalance
    row['best'] = best_bottleneck(sizes, weights) - 1
    return row


def median_ms(function: Any, rounds: int) -> float:
    """The median processor time of a call, which other programs disturb less."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        found.append(1e3 * (time.process_time() - start))
    return statistics.median(found)


def times(count: int, rounds: int) -> List[Dict[str, Any]]:
    """Planning a long chain."""
    model = chain(count)
    sizes = block_sizes(model)
    rows = []
    # What was built before is not to be collected on the way.
    gc.collect()
    gc.freeze()
    for devices in COUNTS:
        for equal in (True, False):
            memory = memory_of(devices, sum(sizes), equal)
            names = [f'xla:{index}' for index in range(devices)]
            limits = {f'xla:{index}': size for index, size in (memory or {}).items()}
            search = Partition(sizes, [limits.get(name, 1.0) for name in names])
            found = dict(
                search=median_ms(search.best, rounds),
                plan=median_ms(functools.partial(plan, model, names, max_memory=memory), rounds),
                accelerate=median_ms(
                    functools.partial(
                        plan, model, names, 'auto', max_memory=memory, force_balance=False
                    ),
                    rounds,
                ),
            )
            rows.append(dict(found, devices=devices, equal=equal))
    return rows


# the example of a user's guide ----------------------------------------------------------------


def example() -> List[Dict[str, Any]]:
    """Llama-3.1-8B on three devices: two splits that a user's guide shows, and ours."""
    model = MODELS['Llama-3.1-8B']()
    made = {name: plan(model, 'cuda:0-2', name) for name in ('auto', 'balanced')}
    sizes = [block.bytes for block in made['balanced'].blocks]
    rows = [
        _split('guide, auto', sizes, [9, 22, 35]),
        _split('guide, balanced', sizes, [12, 23, 35]),
    ]
    return rows + [_planned(name, found) for name, found in made.items()]


def _split(name: str, sizes: Sequence[int], ends: Sequence[int]) -> Dict[str, Any]:
    marks = [0, *ends]
    pairs = list(zip(marks, marks[1:]))
    return _figures(name, [b - a for a, b in pairs], [sum(sizes[a:b]) for a, b in pairs])


def _planned(name: str, made: DevicePlan) -> Dict[str, Any]:
    devices = [block.device for block in made.blocks]
    counts = [devices.count(name) for name in made.devices]
    return _figures(name, counts, list(made.loads.values()))


def _figures(name: str, counts: Sequence[int], loads: Sequence[int]) -> Dict[str, Any]:
    even = [1.0] * len(counts)
    return dict(
        name=name,
        counts=list(counts),
        by_count=imbalance(counts, even),
        score=1.0 / (1.0 + pvariance(counts)),
        loads=[round(load / 1e9, 2) for load in loads],
        by_bytes=imbalance(loads, even),
    )


def main() -> None:
    """Compare, time, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--models', nargs='+', choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        '--blocks', type=int, default=1000, help='of the chain whose plan is timed'
    )
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--json', help='a file for the figures')
    args = parser.parse_args()
    rows = []
    for name in args.models:
        package = re.search(r'\((mm\w+)\)', name)
        if package and importlib.util.find_spec(package.group(1)) is None:
            print(f'{name}: left out, {package.group(1)} is not installed', file=sys.stderr)
            continue
        model = MODELS[name]()
        rows += [compare(name, model, n, equal) for equal in (True, False) for n in COUNTS]
    found = dict(rows=rows, times=times(args.blocks, args.rounds), example=example())
    for name, table in tables(found, 'en').items():
        print(f'\n{name}\n\n{table}')
    above = [
        row
        for row in rows
        if row['accelerate'] is not None and row['ours'] > row['accelerate'] + 1e-9
    ]
    missed = [row for row in rows if abs(row['ours'] - row['best']) > 1e-9]
    print(
        f'\n{len(rows)} rows: ours above accelerate in {len(above)}, not the best in {len(missed)}'
    )
    if args.json:
        write_results(args.json, **found)


if __name__ == '__main__':
    main()
