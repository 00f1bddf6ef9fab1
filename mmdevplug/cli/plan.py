"""``mmdevplug plan``: show which device would hold which part of a model; needs no device."""

import argparse
from typing import List, Optional

from rich.console import Console

from mmdevplug.config.load import load_file
from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import STRATEGIES, DevicePlan
from mmdevplug.model_parallel.make_plan import PlanOptions, make_plan
from mmdevplug.model_parallel.meta_build import build_from_file
from mmdevplug.model_parallel.parse_devices import parse_devices, parse_max_memory
from mmdevplug.model_parallel.sizes import DEFAULT_OPTIMIZER, choose_optimizer
from mmdevplug.utils.atomic_files import check_json, write_json
from mmdevplug.utils.broken_imports import explain_import
from mmdevplug.utils.progress import show_progress

from . import say
from .arguments import Parser


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug plan``."""
    parser = Parser(
        prog='mmdevplug plan',
        description='Plan which device holds which part of a model, without weights and without '
        'the devices.',
    )
    parser.add_argument(
        'model', help='a config of OpenMMLab, or a transformers model: config.json or its folder'
    )
    parser.add_argument('--devices', required=True, help="e.g. 'cuda:0-3' or 'xla:0,xla:2'")
    parser.add_argument('--max-memory', help="e.g. 'cuda:0=10GB,cuda:1=8GB' (default: equal)")
    parser.add_argument('--strategy', default='balanced', help=' | '.join(STRATEGIES))
    parser.add_argument('--no-split', help='classes or modules to be kept whole: A,B')
    parser.add_argument(
        '--balance-threshold', type=float, default=0.3, help='imbalance of an uneven plan, 0 to 1'
    )
    balance = parser.add_mutually_exclusive_group()
    balance.add_argument(
        '--force-balance', action='store_true', default=None, help='refuse an uneven plan'
    )
    balance.add_argument(
        '--no-force-balance',
        action='store_false',
        dest='force_balance',
        help='a device may be left out',
    )
    parser.add_argument(
        '--allow-cpu', action='store_true', help='the host takes what the devices cannot hold'
    )
    parser.add_argument('--training', action='store_true', help='count gradients and optimizer')
    parser.add_argument(
        '--optimizer',
        help=f'name, or values kept for each parameter (default: the one of a config, else '
        f'{DEFAULT_OPTIMIZER})',
    )
    parser.add_argument('--dtype', help='what the weights will be cast to, e.g. bfloat16')
    parser.add_argument('--json', help='a file for the plan as JSON; - prints it alone')
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Plan, print, and write the requested files."""
    args = build_parser().parse_args(argv)
    # Wrong devices, memory and files are refused before a model is built.
    devices = parse_devices(args.devices, exclude_cpu=not args.allow_cpu)
    parse_max_memory(args.max_memory, devices)
    check_json(args.json)
    with show_progress(f'planning {args.model}', say):
        made = _plan(args)
    if args.json != '-':
        Console().print(made)
    if args.json is not None:
        write_json(made.to_dict(), args.json)


def _plan(args: argparse.Namespace) -> DevicePlan:
    try:
        model, cfg = build_from_file(args.model, load_file)
    except PlacementError as error:
        problem = explain_import(error)
        if problem is None:
            raise
        raise PlacementError(f'{args.model!r}: {problem}') from error
    options = PlanOptions(
        strategy=args.strategy,
        max_memory=args.max_memory,
        no_split=[name for name in (args.no_split or '').split(',') if name],
        balance_threshold=args.balance_threshold,
        force_balance=args.force_balance,
        exclude_cpu=not args.allow_cpu,
        dtype=args.dtype,
        training=args.training,
        optimizer=choose_optimizer(args.optimizer, cfg, args.training, say),
    )
    return make_plan(model, args.devices, options)
