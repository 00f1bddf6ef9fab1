"""``mmdevplug check-devices``: show where a config trains, and on which device everything is."""

import argparse
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, List, Optional, Sequence

from mmengine.config import Config
from mmengine.registry import RUNNERS
from rich.console import Console
from rich.text import Text

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.device_guard import POLICIES, DeviceGuard
from mmdevplug.doctor import launch as launch_variables
from mmdevplug.doctor.one_step import prepare_step, strip_config
from mmdevplug.doctor.report import titled_table
from mmdevplug.environments.launch import LaunchEnv
from mmdevplug.errors import DeviceMismatchError, DevPlugError, PlacementError, first_line
from mmdevplug.explanations.one_value import explain_one_value
from mmdevplug.gradients.unused_parameters import REMEDY, describe_unused, listing_unused
from mmdevplug.model.move import describe_misplaced, misplaced_by_plan, misplaced_tensors
from mmdevplug.model_parallel.apply_options import Parallelism
from mmdevplug.utils.byte_sizes import format_bytes

from .arguments import Parser
from .common import add_config_arguments, check_launch_variables, load_config
from .step_devices import ModuleDevices, StepDevices

WIDTH = 1000  # more than any table needs
CHOICES = {True: 'true', False: 'false', None: 'auto'}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug check-devices``."""
    parser = Parser(
        prog='mmdevplug check-devices',
        description='Show on which devices a config trains and why, then do one training step of '
        'its model and data and show where everything lives. Nothing is saved. The exit status '
        'is 1 if something is on the wrong device.',
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
    parser.set_defaults(launcher='none', local_rank=None)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Check a config's devices; the exit status is 1 if something is on the wrong device."""
    args = build_parser().parse_args(argv)
    # One line for each module, however narrow the terminal is.
    console = Console(soft_wrap=True, width=WIDTH)
    for finding in launch_variables.examine():
        remedy = f'; do: {finding.remedy}' if finding.remedy else ''
        console.print(Text(f'launch: {finding.level}: {finding.found}{remedy}'))
    env = check_launch_variables(args)
    with tempfile.TemporaryDirectory() as folder:
        args.work_dir = folder
        cfg = _load(args)
        _print_strategies(cfg, env, console)
        with redirect_stdout(sys.stderr):  # the log of a runner
            runner = RUNNERS.build(cfg)
        problems = _check_step(runner, args, console)
    for problem in problems:
        console.print(Text(problem, style='bold red'))
    devices = ', '.join(map(str, runner.device_context.devices))
    if problems:
        verdict = f'NOT consistent: {len(problems)} problem(s) in one training step on {devices}'
        console.print(Text(verdict, style='bold red'))
        raise SystemExit(1)
    console.print(Text(f'consistent: one training step on {devices}', style='bold green'))


# the configuration ------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> Config:
    """Load the config, without what writes or watches: only one step is trained."""
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
    strip_config(cfg)
    return cfg


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


# the step ---------------------------------------------------------------------------------------


def _check_step(runner: Any, args: argparse.Namespace, console: Console) -> List[str]:
    """Run one training step, print where everything is, and return the problems."""
    guard = DeviceGuard(policy=args.guard, model=runner.model)
    if runner._train_dataloader is None:
        raise DevPlugError(
            'the config has no train_dataloader, so that there is no training step to look at. '
            'Add train_dataloader, train_cfg and optim_wrapper.'
        )
    batch, optim_wrapper = prepare_step(runner)
    failure: List[str] = []
    with StepDevices(runner.model, optim_wrapper) as seen, listing_unused(runner.model) as unused:
        try:
            with guard, explain_one_value(runner, 'train'):
                runner.model.train_step(batch, optim_wrapper=optim_wrapper)
                runner.device_context.materialize()
            _warn_of_unused(unused(), runner, console)
        except DeviceMismatchError as error:
            failure = [str(error)]
        except Exception as error:
            # Whatever the model raises is what the user has to see, after the table.
            traceback.print_exc()
            failure = [f'the step fails with {type(error).__name__}: {first_line(error)}']
    _print_modules(seen.modules(), args.depth, console)
    if guard.policy != 'error' and guard.sites:
        console.print(Text(guard.report()))
        if guard.policy == 'warn':
            failure.append('operations got operands of different devices; see above')
    plan, device = runner.parallelism.plan, runner.device_context.device
    if plan is not None:
        misplaced = [
            f'{name} is on {tensor.device}, but planned on {planned}'
            for name, tensor, planned in misplaced_by_plan(runner.model, plan)
        ]
    else:
        found = misplaced_tensors(runner.model, device)
        misplaced = [f'not on {device}: {describe_misplaced(found)}'] if found else []
    return [*failure, *misplaced, *seen.problems()]


def _warn_of_unused(names: List[str], runner: Any, console: Console) -> None:
    accelerator = runner.device_context.accelerator
    found = describe_unused(names, runner.cfg, accelerator, 'A job of several ranks')
    if found:
        console.print(Text(f'warning: {found} For such a job, {REMEDY}.', style='bold yellow'))


def _print_modules(rows: Sequence[ModuleDevices], depth: Optional[int], console: Console) -> None:
    table = titled_table('one training step; each module with all that is inside it')
    for heading in ('module', 'class', 'bytes', *ModuleDevices._fields[3:]):
        table.add_column(heading, justify='right' if heading == 'bytes' else 'left', no_wrap=True)
    for row in rows:
        if depth is None or row.name.count('.') + bool(row.name) <= depth:
            devices = [' '.join(found) or '-' for found in row[3:]]
            table.add_row(row.name or '(the model)', row.kind, format_bytes(row.size), *devices)
    console.print(table)
