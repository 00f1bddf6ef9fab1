"""``mmdevplug doctor``: find what is wrong here, and print the command that fixes it."""

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from mmdevplug.checks import versions
from mmdevplug.checks.findings import Finding, count_levels, exit_status
from mmdevplug.checks.report import print_report
from mmdevplug.errors import DevPlugError, LaunchError
from mmdevplug.utils.atomic_files import check_writable, write_text
from mmdevplug.version import __version__

from . import say
from .arguments import Parser

#: Of the JSON file; changes when a key changes its meaning or goes.
SCHEMA = 1
MOST_RANKS = 256
#: What a job that fails asks for, where other sections have errors of their own.
_AFTER = 'first what the other errors say: one of them may be the cause'
#: How findings begin that keep the other sections from being examined.
_ESSENTIAL = tuple(
    start
    for name in versions.REQUIRED
    for start in (f'import {name} ', f'{name}: ', f'{name} is not installed')
)


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug doctor``."""
    parser = Parser(
        prog='mmdevplug doctor',
        description='Look for what keeps a training from working here. Nothing is trained but '
        'one step of the config, and nothing is written but the file asked for. The exit status '
        'is 1 if there is an error.',
    )
    parser.add_argument('--nproc', type=int, help='test collectives between this many processes')
    parser.add_argument('--config', help='also check this config, as `mmdevplug check` does')
    parser.add_argument('--accelerator', help='look at this one alone, e.g. cuda, xla, gcu')
    parser.add_argument('--json', help='a file for the findings')
    parser.add_argument('--work-dir', help="where checkpoints would go (default: the config's)")
    add_measure_arguments(parser)
    return parser


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how collectives are timed."""
    parser.add_argument(
        '--timeout',
        type=float,
        default=120.0,
        help='seconds that a collective may take (default: 120)',
    )
    parser.add_argument(
        '--largest-mb', type=float, default=16.0, help='MB of the largest message (default: 16)'
    )
    parser.add_argument(
        '--rounds', type=int, default=5, help='how often each is timed, for a median (default: 5)'
    )


def check_measure_arguments(args: argparse.Namespace) -> None:
    """Refuse numbers that make no test."""
    for option in ('timeout', 'largest_mb', 'rounds'):
        value = getattr(args, option)
        if not 0 < value < float('inf'):
            flag = option.replace('_', '-')
            raise LaunchError(f'--{flag} {value:g}: expected a number above 0.')


def main(argv: Optional[List[str]] = None) -> int:
    """Examine, print, and write the requested file; return 1 if there is an error, else 0."""
    args = build_parser().parse_args(argv)
    try:
        if args.json is not None:
            check_writable(args.json, '--json')
        if args.nproc is not None and not 1 <= args.nproc <= MOST_RANKS:
            raise LaunchError(f'--nproc {args.nproc}: expected 1 to {MOST_RANKS} processes.')
        check_measure_arguments(args)
        return _examine(args)
    except DevPlugError as error:
        say(f'{type(error).__name__}: {error}')
        return 1


def _examine(args: argparse.Namespace) -> int:
    terminal = Console(stderr=True)
    columns = SpinnerColumn(finished_text=' '), '{task.description}', TimeElapsedColumn()
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal) as progress:
        findings = list(examine(args, progress))
    print_report(findings, Console())
    if args.json is not None:
        write_text(json.dumps(as_dict(findings), indent=1), args.json)
    return exit_status(findings)


def examine(args: argparse.Namespace, progress: Progress) -> Iterator[Finding]:
    """Examine all sections in order; stop after the versions if torch or MMEngine are broken."""
    broken = False
    task = progress.add_task('looking at versions', total=1)
    for finding in versions.examine():
        broken |= finding.level == 'error' and finding.found.startswith(_ESSENTIAL)
        yield finding
    progress.advance(task)
    if broken:
        text = 'nothing else was examined, because that needs torch and MMEngine'
        yield Finding('versions', 'note', text)
        return
    options = dict(config=args.config, accelerator=args.accelerator)
    ranks = args.nproc or 1
    work_dir = args.work_dir or str(Path('work_dirs') / Path(args.config or '').stem)
    sections: Dict[str, tuple] = dict(
        accelerators=(options,), launch=(), network=(), limits=(ranks, work_dir), patches=()
    )
    if args.config is not None:
        sections['config'] = (options,)
    if args.nproc is not None:
        measure = (args.largest_mb, args.rounds, args.timeout)
        sections['collectives'] = (ranks, options, *measure)
    earlier = unusable = False
    for name, arguments in sections.items():
        if name == 'collectives' and unusable:
            text = f'not tried, because {args.accelerator} cannot be used here'
            yield Finding('collectives', 'note', text)
            continue
        task = progress.add_task(f'looking at {name}', total=1)
        # Imported here, because they import torch.
        module = 'cli.check' if name == 'config' else f'checks.{name}'
        found = list(import_module(f'mmdevplug.{module}').examine(*arguments))
        progress.advance(task)
        for finding in found:
            failed = finding.level == 'error'
            if failed and earlier and name == 'collectives':
                finding = finding._replace(remedy=_AFTER)
            yield finding
        earlier |= any(finding.level == 'error' for finding in found)
        unusable |= earlier and name == 'accelerators' and args.accelerator is not None


def as_dict(findings: List[Finding]) -> Dict[str, Any]:
    """Return what the JSON file holds."""
    return dict(
        schema=SCHEMA,
        mmdevplug=__version__,
        exit_status=exit_status(findings),
        counts=count_levels(findings),
        findings=[finding.as_dict() for finding in findings],
    )
