"""``mmdevplug doctor``: find what is wrong here, and print the command that fixes it."""

import argparse
from importlib import import_module
from typing import Iterator, List, Optional

from rich.console import Console

from mmdevplug.checks import versions
from mmdevplug.checks.findings import Finding, exit_status
from mmdevplug.checks.report import print_counts, print_finding
from mmdevplug.errors import DevPlugError
from mmdevplug.utils.atomic_files import check_json, write_json

from . import say
from .arguments import Parser

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
        description='Say what is installed, which accelerators there are, how this process was '
        'started, and what is wrong in a config, of which one step is trained. Nothing is written '
        'but the file asked for. The exit status is 1 if there is an error.',
    )
    parser.add_argument('--config', help='also check this config, as `mmdevplug check` does')
    parser.add_argument('--accelerator', help='look at this one alone, e.g. cuda, xla, gcu')
    parser.add_argument('--json', help='a file for the findings; - prints them alone')
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Examine, print, and write the requested file; return 1 if there is an error, else 0."""
    args = build_parser().parse_args(argv)
    findings, console = [], Console(quiet=args.json == '-')
    try:
        check_json(args.json)
        for finding in examine(args):
            findings.append(finding)
            print_finding(finding, console)
    except DevPlugError as error:
        say(f'{type(error).__name__}: {error}')
        return 1
    print_counts(findings, console)
    status = exit_status(findings)
    if args.json is not None:
        listed = [finding._asdict() for finding in findings]
        write_json(dict(exit_status=status, findings=listed), args.json)
    return status


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Examine all sections in order; stop after the versions if torch or MMEngine are broken."""
    broken = False
    for finding in versions.examine():
        broken |= finding.level == 'error' and finding.found.startswith(_ESSENTIAL)
        yield finding
    if broken:
        text = 'nothing else was examined, because that needs torch and MMEngine'
        yield Finding('versions', 'note', text)
        return
    options = dict(config=args.config, accelerator=args.accelerator)
    # Imported here, because they import torch.
    yield from import_module('mmdevplug.checks.accelerators').examine(options)
    yield from import_module('mmdevplug.checks.launch').examine()
    if args.config is not None:
        yield from import_module('mmdevplug.cli.check').examine(options)
