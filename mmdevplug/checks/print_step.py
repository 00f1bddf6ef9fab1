"""Print what ``mmdevplug check`` finds."""

from dataclasses import replace
from typing import Sequence

from mmengine.config import Config
from rich.console import Console
from rich.text import Text

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel.apply_options import Parallelism

from .findings import Finding
from .report import COLOURS

CHOICES = {True: 'true', False: 'false', None: 'auto'}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print findings, each in a line of the colour of its level."""
    for level, found, why, remedy in (finding[1:5] for finding in findings):
        told = f'{level}: {found}' + (f' ({why})' if level == 'warning' and why else '')
        told += f'; do: {remedy}' if remedy else ''
        console.print(Text(told, style=COLOURS[level]))


def print_strategies(cfg: Config, env: LaunchEnv, console: Console) -> None:
    """The accelerator, and what each value of ``model_parallel.enable`` leads to, with the plan.

    A config that is not to be spread has nothing to choose from.
    """
    options = ModelParallelOptions.from_config(cfg.model_parallel)
    device = AcceleratorOptions.from_config(cfg.get('accelerator')).device
    accelerator, reason = choose_accelerator(device)
    count = accelerator.device_count()
    console.print(Text(f'accelerator: {accelerator.name!r} ({reason}), {count} device(s)'))
    if options.enable is False:
        return
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
