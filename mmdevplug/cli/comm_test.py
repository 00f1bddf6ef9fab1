"""Test collectives: ``tools/comm_test.py``, and each process of the doctor's job."""

import argparse
import json
import sys
from contextlib import suppress
from typing import List, Optional

from rich.console import Console
from torch import distributed as torch_dist

from mmdevplug.checks.collectives_rank import Progress, reporting, run_rank
from mmdevplug.checks.report import print_collectives
from mmdevplug.environments.launch_variables import LAUNCHERS, read_launch_env
from mmdevplug.utils.atomic_files import check_writable, write_text

from .arguments import Parser
from .common import run
from .doctor import add_measure_arguments, check_measure_arguments


def build_parser() -> argparse.ArgumentParser:
    """Define the arguments of ``tools/comm_test.py``."""
    parser = Parser(
        prog='comm_test.py',
        description='Run every collective in a job, compare the results with known values, and '
        'time them. The exit status is 0 on all ranks, or 1 on all.',
    )
    parser.add_argument(
        '--launcher',
        choices=[name for name in LAUNCHERS if name != 'none'],
        default='pytorch',
        help='how the processes were started (default: torchrun)',
    )
    parser.add_argument('--accelerator', help='e.g. cpu, cuda, xla, gcu (default: detected)')
    parser.add_argument('--config', help='take custom_imports, accelerator and env_cfg from it')
    add_measure_arguments(parser)
    parser.add_argument('--json', help='a file for the results, written by rank 0')
    parser.add_argument('--progress', help=argparse.SUPPRESS)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Test collectives as one rank of a job; the exit status is 1 if one failed."""
    args = build_parser().parse_args(argv)
    check_measure_arguments(args)
    rank = read_launch_env(args.launcher).rank
    if args.json is not None and rank == 0:
        check_writable(args.json, '--json')
    progress = Progress(rank, args.progress)
    with reporting(progress):
        results = run_rank(
            args.launcher,
            args.accelerator,
            args.config,
            max(4, int(args.largest_mb * 2**20)),
            args.rounds,
            args.timeout,
            progress,
        )
    if rank == 0:
        print_collectives(results, Console(soft_wrap=True))
        if args.json is not None:
            write_text(json.dumps(results, indent=1), args.json)
    with suppress(RuntimeError):  # a rank that is gone is no reason to fail now
        torch_dist.destroy_process_group()
    if not results['passed']:
        raise SystemExit(1)


if __name__ == '__main__':
    sys.exit(run(main))
