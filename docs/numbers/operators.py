"""Compare an accelerator's operators with the CPU's on PyTorch's own samples, with gradients.

PyTorch's OpInfo has samples of some 700 operators. Each is computed on both devices: outputs, and
the gradients of a fixed weighted sum of them. Operators that draw random numbers are left out.
One process computes, and another is started where it ends or hangs.

python -m docs.numbers.operators --accelerator xla [--dtypes float32 bfloat16 int64]
       [--operators NAME ...] [--samples 3] [--plain] [--json FILE]

``--plain`` leaves the replacements of the product out.
"""

import argparse
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence
from unittest import mock

DTYPES = ('float32', 'bfloat16', 'int64')
#: Relative to the largest value, and absolute.
TOLERANCES = dict(float32=(1e-3, 1e-4), bfloat16=(0.05, 1e-2))
#: How long an operator may take, in seconds, with the compiling of all its samples.
LIMIT = 90
#: Factors that are not unique, as another sign or basis is as right; and memory that nobody wrote.
NOT_COMPARED = re.compile(
    r'(linalg\.)?(eig|eigh|svd|qr|lu|lu_\w+|ldl_\w+|householder_product|lstsq)|'
    r'(pca|svd)_lowrank|lobpcg|geqrf|ormqr|.*empty.*|.*resize.*|as_strided.*|new_.*|'
    r'uniform|cauchy|exponential|geometric|log_normal|normal.*|rand.*|bernoulli'
)


def samples_of(op: Any, dtype: Any, count: int) -> Iterator[Any]:
    """Yield samples on the CPU, the same in each process."""
    import torch

    torch.manual_seed(0)
    learns = op.supports_autograd and dtype.is_floating_point
    return itertools.islice(op.sample_inputs('cpu', dtype, requires_grad=learns), count)


def compute(op: Any, sample: Any, device: Any) -> List[Any]:
    """Outputs and gradients of one sample on a device, on the host afterwards."""
    import torch
    from torch.utils import _pytree as pytree

    from mmdevplug.utils.pytree import replace_parts

    leaves: List[Any] = []

    def move(value: Any) -> Any:
        moved = value.detach().to(device, copy=True)
        if value.requires_grad:
            moved.requires_grad_()
            leaves.append(moved)
        return moved

    given, args, kwargs = replace_parts((sample.input, sample.args, sample.kwargs), move)
    torch.manual_seed(0)
    # Not in place of a leaf.
    outputs = op(given, *args, **kwargs)
    flat = [each for each in pytree.tree_flatten(outputs)[0] if isinstance(each, torch.Tensor)]
    learned = [each for each in flat if each.requires_grad and each.is_floating_point()]
    gradients: Sequence[Any] = []
    if leaves and learned:
        weights = [torch.linspace(0.5, 1.5, max(1, each.numel())) for each in learned]
        weights = [
            one[: each.numel()].view(each.shape).to(each.dtype).to(each.device)
            for one, each in zip(weights, learned)
        ]
        gradients = torch.autograd.grad(learned, leaves, weights, allow_unused=True)
    every = [each.detach() for each in flat]
    return [
        [each.cpu() for each in every],
        [None if each is None else each.detach().cpu() for each in gradients],
    ]


def difference(found: Any, expected: Any, dtype: str, loose: float = 1) -> Optional[str]:
    """Say how a tensor differs; None if it does not, beyond rounding (``loose`` times)."""
    import torch

    if found is None or expected is None:
        there = found if expected is None else expected
        missing = there is not None and bool((there != 0).any())
        return 'missing' if missing else None
    if expected.layout is not torch.strided:
        return None
    if found.shape != expected.shape:
        return f'shape {tuple(found.shape)} for {tuple(expected.shape)}'
    if found.dtype != expected.dtype:
        return f'{found.dtype} for {expected.dtype}'.replace('torch.', '')
    if not expected.numel():
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return None if bool((found == expected).all()) else 'values'
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    same = (found == expected) | (torch.isnan(found) & torch.isnan(expected))
    if bool(same.all()):
        return None
    if bool((torch.isnan(found) != torch.isnan(expected)).any()):
        return 'NaN for a number' if bool(torch.isnan(found).any()) else 'a number for NaN'
    # Of integers, floating-point results are in float32.
    relative, absolute = TOLERANCES['float32' if dtype == 'int64' else dtype]
    finite = torch.isfinite(expected)
    largest = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
    apart = (found - expected).abs()
    apart = torch.where(same, torch.zeros_like(apart), apart)
    if bool(torch.isfinite(apart).all()) and float(apart.max()) <= loose * (
        absolute + relative * largest
    ):
        return None
    return 'values'


def compare(op: Any, dtype: str, device: Any, count: int, loose: float = 1) -> Dict[str, Any]:
    """Compare one operator in one dtype: how many samples, and what differs in how many."""
    import torch

    found: Dict[str, Any] = dict(samples=0, differ=0, raised=0, what=[])
    kind = getattr(torch, dtype)
    for sample in samples_of(op, kind, count):
        tensors = [t for t in (sample.input, *sample.args) if isinstance(t, torch.Tensor)]
        if any(each.layout is not torch.strided or each.is_complex() for each in tensors):
            continue
        try:
            expected = compute(op, sample, 'cpu')
        except Exception:  # the CPU has no kernel, or the sample is one of an error
            continue
        if is_random(op, sample, dtype):
            continue
        found['samples'] += 1
        try:
            there = compute(op, sample, device)
        except Exception as error:
            found['raised'] += 1
            found.setdefault(
                'error', f'{type(error).__name__}: {str(error).splitlines()[0][:120]}'
            )
            continue
        said = set()
        for word, ours, theirs in zip(('output', 'gradient'), there, expected):
            if len(ours) != len(theirs):
                said.add(f'{word}: number')
            said |= {
                f'{word}: {problem}'
                for one, other in zip(ours, theirs)
                for problem in [difference(one, other, dtype, loose)]
                if problem is not None
            }
        if said:
            found['differ'] += 1
            found['what'] = sorted({*found['what'], *said})
    return found


def listed(dtypes: Sequence[str], names: Sequence[str]) -> List[Any]:
    """The operators of PyTorch that are compared: each with its dtype."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    made = []
    for op in op_db:
        name = op.name + (f'.{op.variant_test_name}' if op.variant_test_name else '')
        if (names and op.name not in names) or NOT_COMPARED.fullmatch(op.name):
            continue
        kinds = op.supported_dtypes('cpu')
        made += [(name, each, op) for each in dtypes if getattr(torch, each) in kinds]
    return made


def is_random(op: Any, sample: Any, dtype: str) -> bool:
    """Whether two seeds give two results on the CPU."""
    import torch

    results: List[Any] = []
    for seed in (1, 2):
        # OpInfo seeds before each call of an operator that draws.
        other_seed = partial(_seed, torch.manual_seed, seed)
        with mock.patch.object(torch, 'manual_seed', other_seed), suppress(Exception):
            torch.manual_seed(0)
            results.append(op(sample.input, *sample.args, **sample.kwargs))
    pairs = zip(*(_tensors(each) for each in results)) if len(results) == 2 else ()
    return any(one.shape == other.shape and difference(one, other, dtype) for one, other in pairs)


def _tensors(nested: Any) -> List[Any]:
    import torch
    from torch.utils import _pytree as pytree

    return [
        each.detach() for each in pytree.tree_flatten(nested)[0] if isinstance(each, torch.Tensor)
    ]


def _seed(seed: Callable[[int], Any], more: int, value: int) -> Any:
    return seed(value + more)


def work(args: argparse.Namespace) -> None:
    """Compare from one number on, and print a line before and after each."""
    import torch

    from tests.conformance.card import Asked, Card

    card = Card(Asked(args.accelerator, args.card_config))
    device = card.device
    if not args.plain:
        from mmdevplug import init_device, patch_mmengine

        init_device('none', card.key)
        patch_mmengine()
    torch.ones(1, device=device).cpu()
    every = listed(args.dtypes, args.operators)
    print(json.dumps(dict(total=len(every))), flush=True)
    for number, (name, dtype, op) in enumerate(every):
        if number % 100 == 0:
            print(f'{number} of {len(every)}', file=sys.stderr, flush=True)
        if number < args.begin or number % args.parts != args.part:
            continue
        print(json.dumps(dict(begins=number, name=name, dtype=dtype)), flush=True)
        row = compare(op, dtype, device, args.samples)
        print(json.dumps(dict(row, ends=number, name=name, dtype=dtype)), flush=True)


def run_part(
    module: str,
    options: Sequence[str],
    part: int,
    parts: int,
    note: Callable[[Any], None],
    limit: float = LIMIT,
) -> None:
    """Compare every ``parts``-th item of a module in processes, one after another.

    An item that takes more than ``limit`` seconds, or ends its process, is noted as such.
    """
    begin = 0
    while True:
        command = [sys.executable, '-m', module, *options]
        command += ['--begin', str(begin), '--part', str(part), '--parts', str(parts)]
        job = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=None if part == 0 else subprocess.DEVNULL,
            text=True,
        )
        lines: Any = queue.Queue()

        def read(output: Any = job.stdout, lines: Any = lines) -> None:
            for line in output:
                if line.startswith('{'):
                    lines.put(json.loads(line))
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        running = None
        while True:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                job.kill()
                note(dict(running, samples=1, ended='does not end'))
                break
            if line is None:
                if running is not None:
                    note(dict(running, samples=1, ended='ends the process'))
                break
            if 'begins' in line:
                running = line
            elif 'ends' in line:
                running = None
                note(line)
        job.wait()
        if running is None:
            if job.returncode:
                raise SystemExit(f'{" ".join(command)} ended with status {job.returncode}')
            return
        begin = running['begins'] + 1


def table(rows: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The rows that differ, in the order of their names."""
    kept = [row for row in rows if row.get('differ') or row.get('ended')]
    return [
        dict(
            operator=row['name'],
            dtype=row['dtype'],
            samples=row['samples'],
            differ=row.get('differ', 1),
            what=row.get('what') or [row['ended']],
        )
        for row in sorted(kept, key=lambda row: (row['name'], row['dtype']))
    ]


def main(argv: Optional[Sequence[str]] = None) -> Dict[str, Any]:
    """Compare, print what differs, and return it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--accelerator', required=True)
    parser.add_argument('--dtypes', nargs='+', choices=DTYPES, default=list(DTYPES))
    parser.add_argument('--operators', nargs='*', default=[])
    parser.add_argument('--samples', type=int, default=3)
    parser.add_argument('--plain', action='store_true')
    parser.add_argument('--card-config', help='a config with custom_imports of the card')
    parser.add_argument('--json')
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--begin', type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument('--part', type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument('--parts', type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:
        work(args)
        return {}
    options = ['--accelerator', args.accelerator, '--samples', str(args.samples)]
    options += ['--dtypes', *args.dtypes, '--operators', *args.operators]
    options += ['--plain'] * args.plain
    options += ['--card-config', args.card_config] if args.card_config else []
    rows: List[Dict[str, Any]] = []
    module = 'docs.numbers.operators'
    with ThreadPoolExecutor(args.jobs) as pool:
        parts = [
            pool.submit(run_part, module, options, part, args.jobs, rows.append)
            for part in range(args.jobs)
        ]
    for part in parts:
        part.result()  # raises what was raised there
    compared = [row for row in rows if row['samples']]
    different = table(compared)
    import torch

    found = dict(
        accelerator=args.accelerator,
        torch=torch.__version__.split('+')[0],
        plain=args.plain,
        operators=len({row['name'] for row in compared}),
        compared=len(compared),
        samples=sum(row['samples'] for row in compared),
        raised=sorted({row['name'] for row in compared if row.get('raised')}),
        different=different,
    )
    for row in different:
        print(f'{row["operator"]:40} {row["dtype"]:9} {row["differ"]}/{row["samples"]} ', end='')
        print('; '.join(row['what']))
    print(
        f'{args.accelerator}: {found["operators"]} operators, {found["compared"]} with a dtype, '
        f'{found["samples"]} samples; {len(different)} differ, '
        f'{len(found["raised"])} operators raise errors'
    )
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump(found, file, indent=1)
            file.write('\n')
    return found


if __name__ == '__main__':
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    main()
