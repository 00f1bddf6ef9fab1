"""Test collectives: ``tools/comm_test.py``, and each process of the doctor's job."""

import argparse
import json
import sys
from typing import List, Optional

from rich.console import Console

from mmdevplug.doctor.comm_progress import Progress, laggards
from mmdevplug.doctor.comm_rank import Measure, is_first, leave, rank_and_size, run_rank
from mmdevplug.doctor.report import print_collectives
from mmdevplug.doctor.request import Setting
from mmdevplug.environments.launch import LAUNCHERS
from mmdevplug.utils.files import check_writable, write_text

from .common import run
from .doctor import add_measure_arguments, check_measure


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``tools/comm_test.py``."""
    parser = argparse.ArgumentParser(
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
    parser.add_argument('--accelerator', help='e.g. cpu, cuda, xla, gcu; else what is found')
    parser.add_argument('--config', help='take custom_imports, accelerator and env_cfg from it')
    add_measure_arguments(parser)
    parser.add_argument('--json', help='a file for the results, written by rank 0')
    parser.add_argument('--progress', help=argparse.SUPPRESS)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Test collectives as one rank of a job.

    Raises:
        DevPlugError: If the job cannot be started.
        SystemExit: With status 1 if a collective failed.
    """
    args = build_parser().parse_args(argv)
    check_measure(args)
    measure = Measure(max(4, int(args.largest_mb * 2**20)), args.rounds, args.timeout)
    rank, world_size = rank_and_size(args.launcher)
    if args.json is not None and rank == 0:
        check_writable(args.json, '--json')
    progress = Progress(rank, world_size, args.progress)
    setting = Setting(args.config, args.accelerator)
    try:
        results = run_rank(args.launcher, setting, measure, progress)
    except Exception as error:
        progress.failed(error)
        for report in laggards(progress.others()):
            print(
                f'rank {report["rank"]} is the last in {report["stage"]!r}: it hangs or was '
                f'ended.',
                file=sys.stderr,
            )
        raise
    if is_first():
        print_collectives(results, Console(soft_wrap=True))
        if args.json is not None:
            write_text(json.dumps(results, indent=1), args.json)
    leave()
    if not results['passed']:
        raise SystemExit(1)


if __name__ == '__main__':
    sys.exit(run(main))
