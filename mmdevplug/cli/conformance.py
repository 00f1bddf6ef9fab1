"""``mmdevplug conformance``: check that an accelerator does what training needs."""

import argparse
import json
import os
import tempfile
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

import torch
from mmengine.config import Config

from mmdevplug.checks.conformance.checks import CHECKS, FAILED, run_checks
from mmdevplug.errors import LaunchError
from mmdevplug.utils.atomic_files import check_writable, write_text
from mmdevplug.version import __version__

from . import say
from .arguments import Parser
from .common import KeyValueAction

#: Of the JSON file; changes when a key changes its meaning or goes.
SCHEMA = 1


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug conformance``."""
    parser = Parser(
        prog='mmdevplug conformance',
        description='Check that an accelerator does what training needs, each check in a process '
        'of its own, and print a table in Markdown. The exit status is 1 if a check fails.',
    )
    parser.add_argument('--accelerator', required=True, help='e.g. cuda, xla, gcu, npu')
    parser.add_argument('--config', help='take custom_imports and accelerator from it')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=KeyValueAction,
        metavar='KEY=VALUE',
        help='replace options of the config, e.g. accelerator.backend=gloo',
    )
    parser.add_argument(
        '--checks',
        nargs='+',
        choices=CHECKS,
        help='run these after detection (default: all)',
    )
    parser.add_argument('--timeout', type=float, default=180.0, help='of a step, in seconds')
    parser.add_argument('--json', help='a file for the results')
    return parser


@contextmanager
def _merged(
    path: Optional[str], changes: Optional[Dict[str, Any]], accelerator: str
) -> Iterator[Optional[str]]:
    """The path of a config with changes, which every check reads in a process of its own."""
    if not changes:
        yield path
        return
    # The checks import what it names.
    cfg = Config() if path is None else Config.fromfile(path, import_custom_modules=False)
    if not isinstance(cfg.get('accelerator'), dict):
        cfg.accelerator = dict(type=cfg.get('accelerator') or accelerator)
    cfg.merge_from_dict(changes)
    with tempfile.TemporaryDirectory(prefix='mmdevplug-conformance-') as folder:
        merged = os.path.join(folder, 'merged.py')
        write_text(cfg.pretty_text, merged)
        yield merged


def main(argv: Optional[List[str]] = None) -> None:
    """Run the checks and print them; the exit status is 1 if one fails."""
    args = build_parser().parse_args(argv)
    if not 0 < args.timeout < float('inf'):
        raise LaunchError(f'--timeout {args.timeout:g}: expected a number above 0.')
    if args.json is not None:
        check_writable(args.json, '--json')
    print(f'`{args.accelerator}`, mmdevplug {__version__}, torch {torch.__version__}\n')
    print('| check | result | measured |\n| --- | --- | --- |', flush=True)
    findings = []
    with _merged(args.config, args.cfg_options, args.accelerator) as config:
        for found in run_checks(args.accelerator, config, args.timeout, args.checks or CHECKS):
            findings.append(found)
            cell = ' '.join(found.found.split()).replace('|', '\\|')
            print(f'| {found.section} | {found.level} | {cell} |', flush=True)
    failed = [found for found in findings if found.level == FAILED]
    for found in failed:
        say(f'{found.section}: {found.remedy}')
    if args.json is not None:
        results = dict(
            schema=SCHEMA,
            mmdevplug=__version__,
            torch=torch.__version__,
            accelerator=args.accelerator,
            exit_status=int(bool(failed)),
            findings=[found.as_dict() for found in findings],
        )
        write_text(json.dumps(results, indent=1), args.json)
    if failed:
        raise SystemExit(1)
