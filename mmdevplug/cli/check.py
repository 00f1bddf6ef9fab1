"""``mmdevplug check``: start a training, train one step, and say what is wrong."""

import argparse
from typing import Callable, Iterator, List, Optional

from mmengine.config import Config
from rich.console import Console
from rich.text import Text

from mmdevplug.checks import launch as launch_variables
from mmdevplug.checks.findings import Finding, exit_status
from mmdevplug.checks.isolated import TaskOptions, run_isolated
from mmdevplug.checks.one_step import section, train_one_step
from mmdevplug.checks.print_step import CHOICES, print_findings, print_strategies
from mmdevplug.device_guard import POLICIES
from mmdevplug.errors import PlacementError
from mmdevplug.utils.broken_imports import explain_versions

from .arguments import Parser
from .common import add_config_arguments, check_launch_variables, load_config

WIDTH = 1000  # more than any table needs
STEP_SECONDS = 300.0


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug check``."""
    parser = Parser(
        prog='mmdevplug check',
        description='Start a training of a config as `mmdevplug train` does, train one step, and '
        'show what is wrong. Nothing is saved. The exit status is 1 if something is wrong.',
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
        '--no-comparison',
        action='store_true',
        help='leave out the comparison of outputs and gradients with the CPU',
    )
    parser.set_defaults(launcher='none', local_rank=None, work_dir=None)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Check a config; the exit status is 1 if something is wrong."""
    args = build_parser().parse_args(argv)
    # One line for each finding, however narrow the terminal is.
    console = Console(soft_wrap=True, width=WIDTH)
    print_findings(launch_variables.examine(), console)
    env = check_launch_variables(args)
    cfg = _load(args)
    print_strategies(cfg, env, console)
    step = train_one_step(cfg, args.guard, not args.no_comparison)
    if step.moved:
        console.print(Text(step.moved))
    print_findings(step.findings, console)
    problems = sum(finding.level == 'error' for finding in step.findings)
    if problems:
        verdict = f'NOT consistent: {problems} problem(s) in one training step on {step.devices}'
        console.print(Text(verdict, style='bold red'))
    else:
        verdict = f'consistent: one training step on {step.devices}'
        console.print(Text(verdict, style='bold green'))
    raise SystemExit(exit_status(step.findings))


# the section of the doctor ----------------------------------------------------------------------


def examine(options: TaskOptions, seconds: float = STEP_SECONDS) -> Iterator[Finding]:
    """Check a config in a process of its own, for the doctor.

    Args:
        options (dict): ``config``, its path, and ``accelerator``, a name or None.
        seconds (float): How long a step may take. Defaults to 300.
    """
    return run_isolated(__name__, [options['config']], options, seconds)


def work(task: str, options: TaskOptions, say: Callable[[str], None]) -> Iterator[Finding]:
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
