"""``mmdevplug check``: start a training, train one step, and say what is wrong."""

import argparse
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from mmengine.config import Config
from rich.console import Console
from rich.text import Text

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.checks import launch as launch_variables
from mmdevplug.checks.findings import Finding, exit_status
from mmdevplug.checks.isolated import run_isolated
from mmdevplug.checks.one_step import section, train_one_step
from mmdevplug.checks.report import COLOURS, titled_table
from mmdevplug.checks.step_devices import ModuleDevices
from mmdevplug.checks.versions import explain_versions
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.device_guard import POLICIES
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel.apply_options import Parallelism
from mmdevplug.utils.byte_sizes import format_bytes

from .arguments import Parser
from .common import add_config_arguments, check_launch_variables, load_config

WIDTH = 1000  # more than any table needs
CHOICES = {True: 'true', False: 'false', None: 'auto'}
STEP_SECONDS = 300.0


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug check``."""
    parser = Parser(
        prog='mmdevplug check',
        description='Start a training of a config as `mmdevplug train` does, train one step, and '
        'show what is wrong and on which device everything is. Nothing is saved. The exit status '
        'is 1 if something is wrong.',
    )
    parser.add_argument(
        '--model-parallel',
        choices=list(CHOICES.values()),
        # True, False and None are accepted, too.
        type=lambda text: {'none': 'auto'}.get(text.lower(), text.lower()),
        help="in place of the config's model_parallel.enable",
    )
    parser.add_argument('--devices', help="of model_parallel: a number, or e.g. 'cuda:0-3'")
    add_config_arguments(parser)
    parser.add_argument(
        '--guard',
        choices=POLICIES,
        default='error',
        help='what happens to an operation that mixes devices: it ends the step, is reported, or '
        'its operands are moved (default: error)',
    )
    parser.add_argument(
        '--depth', type=int, help='show modules down to this level (default: all of them)'
    )
    parser.set_defaults(launcher='none', local_rank=None, work_dir=None)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Check a config; the exit status is 1 if something is wrong."""
    args = build_parser().parse_args(argv)
    # One line for each module, however narrow the terminal is.
    console = Console(soft_wrap=True, width=WIDTH)
    _print_findings(launch_variables.examine(), console)
    env = check_launch_variables(args)
    cfg = _load(args)
    _print_strategies(cfg, env, console)
    step = train_one_step(cfg, args.guard)
    _print_modules(step.modules, args.depth, console)
    if step.moved:
        console.print(Text(step.moved))
    _print_findings(step.findings, console)
    problems = sum(finding.level == 'error' for finding in step.findings)
    if problems:
        verdict = f'NOT consistent: {problems} problem(s) in one training step on {step.devices}'
        console.print(Text(verdict, style='bold red'))
    else:
        verdict = f'consistent: one training step on {step.devices}'
        console.print(Text(verdict, style='bold green'))
    raise SystemExit(exit_status(step.findings))


# the section of the doctor ----------------------------------------------------------------------


def examine(options: Dict[str, Any], seconds: float = STEP_SECONDS) -> Iterator[Finding]:
    """Check a config in a process of its own, for the doctor.

    Args:
        options (dict): ``config``, its path, and ``accelerator``, a name or None.
        seconds (float): How long a step may take. Defaults to 300.
    """
    return run_isolated(__name__, [options['config']], options, seconds)


def work(task: str, options: Dict[str, Any], say: Callable[[str], None]) -> Iterator[Finding]:
    """Check one config; see :mod:`mmdevplug.checks.isolated`."""
    named = ['--accelerator', options['accelerator']] if options['accelerator'] else []
    args = build_parser().parse_args([task, *named])
    with explain_versions():
        say('loading the config')
        check_launch_variables(args)
        cfg = _load(args)
        say('one training step')
        step = train_one_step(cfg)
    if exit_status(step.findings) == 0:
        yield section.ok(f'{task}: one training step on {step.devices}')
    yield from step.findings


# the configuration ------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> Config:
    cfg = load_config(args)
    options = cfg.get('model_parallel')
    options = dict(options) if isinstance(options, dict) else dict(enable=options is True)
    if args.devices is not None:
        devices = args.devices
        options['devices'] = int(devices) if devices.isdigit() else devices
        if args.model_parallel is None and options.get('enable') is False:
            raise PlacementError(
                f'--devices {devices} is for a model over several devices, but '
                f'model_parallel.enable is False. Add --model-parallel true.'
            )
    # The guard of this command reports; the runner's would move operands.
    cfg.model_parallel = dict(options, guard=None)
    return cfg


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    for level, found, why, remedy in (finding[1:5] for finding in findings):
        told = f'{level}: {found}' + (f' ({why})' if level == 'warning' and why else '')
        told += f'; do: {remedy}' if remedy else ''
        console.print(Text(told, style=COLOURS[level]))


def _print_strategies(cfg: Config, env: LaunchEnv, console: Console) -> None:
    """What each value of ``model_parallel.enable`` leads to, and the plan of the config's."""
    options = ModelParallelOptions.from_config(cfg.model_parallel)
    device = AcceleratorOptions.from_config(cfg.get('accelerator')).device
    accelerator, reason = choose_accelerator(device)
    count = accelerator.device_count()
    console.print(Text(f'accelerator: {accelerator.name!r} ({reason}), {count} device(s)'))
    plan = None
    for enable, word in CHOICES.items():
        parallelism = Parallelism(
            replace(options, enable=enable),
            cfg.get('model'),
            (cfg.get('optim_wrapper') or {}).get('optimizer'),
            cfg.get('default_scope') or 'mmengine',
        )
        try:
            parallelism.choose_devices(accelerator, env)
        except PlacementError as error:
            outcome = f'refused: {error}'
        else:
            found = parallelism.strategy
            outcome = f'{found.kind} on {", ".join(map(str, found.devices))}: {found.reason}'
        is_chosen = enable is options.enable
        plan = parallelism.plan if is_chosen else plan
        mark, style = ('*', 'bold') if is_chosen else (' ', 'dim')
        console.print(Text(f'{mark} model_parallel.enable={word:6}{outcome}', style))
    if plan is not None:
        console.print(Text(str(plan)))


def _print_modules(rows: Sequence[ModuleDevices], depth: Optional[int], console: Console) -> None:
    table = titled_table('one training step; each module with all that is inside it')
    for heading in ('module', 'class', 'bytes', *ModuleDevices._fields[3:]):
        table.add_column(heading, justify='right' if heading == 'bytes' else 'left', no_wrap=True)
    for row in rows:
        if depth is None or row.name.count('.') + bool(row.name) <= depth:
            devices = [' '.join(found) or '-' for found in row[3:]]
            table.add_row(row.name or '(the model)', row.kind, format_bytes(row.size), *devices)
    console.print(table)
