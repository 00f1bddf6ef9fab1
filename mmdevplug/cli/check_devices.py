"""``mmdevplug check-devices``: show where a config trains, and on which device everything is."""

import argparse
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, Iterator, List, Optional, Sequence

from mmengine.config import Config
from mmengine.registry import RUNNERS
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.device_guard import POLICIES, DeviceGuard
from mmdevplug.doctor import launch as launch_variables
from mmdevplug.environments.launch import LaunchEnv
from mmdevplug.errors import DeviceMismatchError, DevPlugError, PlacementError, first_line
from mmdevplug.model.move import describe_misplaced, misplaced_by_plan, misplaced_tensors
from mmdevplug.model_parallel.parallelism import Parallelism
from mmdevplug.utils.byte_sizes import format_bytes

from .common import Options, check_launch_variables, load_config, run
from .step_devices import ModuleDevices, StepDevices

#: More than any table needs.
WIDTH = 1000
ASKED = {True: 'true', False: 'false', None: 'auto'}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug check-devices``."""
    parser = argparse.ArgumentParser(
        prog='mmdevplug check-devices',
        description='Tell on which devices a config trains and why, then do one training step of '
        'its model and data and show where everything lives. Nothing is saved. The exit status '
        'is 1 if something is on the wrong device.',
        allow_abbrev=False,
    )
    parser.add_argument('config', help='path of the config')
    parser.add_argument(
        '--model-parallel',
        choices=list(ASKED.values()),
        type=_as_word,
        help="in place of the config's model_parallel.enable",
    )
    parser.add_argument('--devices', help="of model_parallel: a number, or e.g. 'cuda:0-3'")
    parser.add_argument(
        '--accelerator', help='lay the base config of this accelerator over CONFIG'
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Options,
        help='override settings of the config: key=value, key="[a,b]"',
    )
    parser.add_argument(
        '--guard',
        choices=POLICIES,
        default='error',
        help='what happens to an operation that mixes devices: it ends the step, is told of, or '
        'gets what it needs (default: error)',
    )
    parser.add_argument(
        '--depth', type=int, help='show modules down to this level (default: all of them)'
    )
    parser.set_defaults(launcher='none', local_rank=None)
    return parser


def _as_word(text: str) -> str:
    """``True``, ``False`` and ``None`` are other names of true, false and auto."""
    return {'none': 'auto'}.get(text.lower(), text.lower())


def main(argv: Optional[List[str]] = None) -> None:
    """Check a config's devices.

    Args:
        argv (List[str], optional): Arguments; those of the command line when None.

    Raises:
        DevPlugError: If the config cannot be trained as it stands.
        SystemExit: With status 1 if something is on the wrong device.
    """
    args = build_parser().parse_args(argv)
    # One line for each module, however narrow the terminal is.
    console = Console(soft_wrap=True, width=WIDTH)
    _print_launch_variables(console)
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
        told = f'NOT consistent: {len(problems)} problem(s) in one training step on {devices}'
        console.print(Text(told, style='bold red'))
        raise SystemExit(1)
    console.print(Text(f'consistent: one training step on {devices}', style='bold green'))


# the configuration ------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> Config:
    """The config, without what writes or watches: this is one step of nothing but training."""
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
    # The guard is ours: it is to tell, and the runner's is to help.
    cfg.model_parallel = dict(options, guard=None)
    for key in ('visualizer', 'custom_hooks', 'resume', 'load_from'):
        cfg.pop(key, None)
    cfg.default_hooks = dict(cfg.get('default_hooks') or {}, checkpoint=None)
    return cfg


def _print_launch_variables(console: Console) -> None:
    for finding in launch_variables.examine():
        remedy = f'; do: {finding.remedy}' if finding.remedy else ''
        console.print(Text(f'launch: {finding.level}: {finding.found}{remedy}'))


def _print_strategies(cfg: Config, env: LaunchEnv, console: Console) -> None:
    """What each value of ``model_parallel.enable`` leads to, and the plan of the config's."""
    options = ModelParallelOptions.from_config(cfg.model_parallel)
    device = AcceleratorOptions.from_config(cfg.get('accelerator')).device
    accelerator, reason = choose_accelerator(device)
    count = accelerator.device_count()
    console.print(Text(f'accelerator: {accelerator.name!r} ({reason}), {count} device(s)'))
    chosen: Optional[Parallelism] = None
    for enable, word in ASKED.items():
        parallelism = Parallelism(
            replace(options, enable=enable),
            cfg.get('model'),
            (cfg.get('optim_wrapper') or {}).get('optimizer'),
            cfg.get('default_scope') or 'mmengine',
        )
        try:
            parallelism.choose_devices(accelerator, env)
        except PlacementError as error:
            told = f'refused: {error}'
        else:
            found = parallelism.strategy
            assert found is not None
            told = f'{found.kind} on {", ".join(map(str, found.devices))}: {found.reason}'
        is_chosen = enable is options.enable
        chosen = parallelism if is_chosen else chosen
        mark, style = ('*', 'bold') if is_chosen else (' ', 'dim')
        console.print(Text(f'{mark} model_parallel.enable={word:6}{told}', style))
    if chosen is not None and chosen.plan is not None:
        console.print(Text(str(chosen.plan)))


# the step ---------------------------------------------------------------------------------------


def _check_step(runner: Any, args: argparse.Namespace, console: Console) -> List[str]:
    """Do one training step, print where everything is, and return what is wrong."""
    guard = DeviceGuard(policy=args.guard, model=runner.model)
    if runner._train_dataloader is None:
        raise DevPlugError(
            'the config has no train_dataloader, so that there is no training step to look at. '
            'Add train_dataloader, train_cfg and optim_wrapper.'
        )
    # As Runner.train does, without initializing weights, which may be downloaded.
    optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    optim_wrapper.initialize_count_status(runner.model, 0, 1)
    batch = next(iter(runner.build_dataloader(runner._train_dataloader, seed=0)))
    runner.model.train()
    failure: List[str] = []
    with StepDevices(runner.model, optim_wrapper) as seen:
        try:
            with guard:
                runner.model.train_step(batch, optim_wrapper=optim_wrapper)
                runner.device_context.materialize()
        except DeviceMismatchError as error:
            failure = [str(error)]
        except Exception as error:
            # Whatever the model raises is what the user has to see, after the table.
            traceback.print_exc()
            failure = [f'the step fails with {type(error).__name__}: {first_line(error)}']
    _print_modules(seen.modules(), args.depth, console)
    return [*failure, *_guarded(guard, console), *_misplaced(runner), *seen.problems()]


def _guarded(guard: DeviceGuard, console: Console) -> Iterator[str]:
    """What the guard has told of, or moved, without ending the step."""
    if guard.policy == 'error' or not guard.sites:
        return
    console.print(Text(guard.report()))
    if guard.policy == 'warn':
        yield 'operations got operands of different devices; see above'


def _misplaced(runner: Any) -> Iterator[str]:
    """Weights that are not where the strategy has them."""
    plan = runner.parallelism.plan
    if plan is None:
        left = misplaced_tensors(runner.model, runner.device_context.device)
        if left:
            yield f'not on {runner.device_context.device}: {describe_misplaced(left)}'
        return
    for name, tensor, planned in misplaced_by_plan(runner.model, plan):
        yield f'{name} is on {tensor.device}, but planned on {planned}'


def _print_modules(rows: Sequence[ModuleDevices], depth: Optional[int], console: Console) -> None:
    table = Table(
        title='one training step; each module with all that is inside it',
        title_justify='left',
        title_style='bold',
        box=SIMPLE_HEAD,
    )
    for heading in ('module', 'class', 'bytes', *ModuleDevices._fields[3:]):
        table.add_column(heading, justify='right' if heading == 'bytes' else 'left', no_wrap=True)
    for row in rows:
        if depth is None or row.name.count('.') + bool(row.name) <= depth:
            devices = [' '.join(found) or '-' for found in row[3:]]
            table.add_row(row.name or '(the model)', row.kind, format_bytes(row.size), *devices)
    console.print(table)


if __name__ == '__main__':
    sys.exit(run(main))
