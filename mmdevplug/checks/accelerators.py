"""Section *accelerators*: which families are there, and whether every device computes."""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Callable, Iterator, List, Optional

import torch
from mmengine.config import Config

from mmdevplug.accelerators import (
    Accelerator,
    available_accelerators,
    choose_accelerator,
    probe_device,
)
from mmdevplug.accelerators.detection import DETECTION_ORDER, find_registered, registered_names
from mmdevplug.accelerators.torch_native import TorchNativeAccelerator
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.errors import DevPlugError
from mmdevplug.registry import ACCELERATORS
from mmdevplug.utils.annotations import AnyConfig
from mmdevplug.utils.byte_sizes import format_bytes

from .findings import Finding, Section
from .isolated import TaskOptions, run_isolated

section = Section('accelerators')
STEP_SECONDS = 120.0
CHOICE = 'choice'


def examine(options: TaskOptions, seconds: float = STEP_SECONDS) -> List[Finding]:
    """Examine every family, or ``options['accelerator']``, and compute on each device."""
    # A vendor's package may change what PyTorch answers afterwards, so those without come first.
    ordered = list(reversed(DETECTION_ORDER))
    names = ordered + [name for name in registered_names() if name not in ordered]
    findings, absent = [], []
    # The first backward of a process starts autograd's threads, for as many devices as are known
    # by then: after one on the CPU, the second card of a package imported later has none.
    tasks = [*names, CHOICE]
    processes = [tasks[:1], tasks[1:]] if tasks[0] == 'cpu' else [tasks]
    if options['accelerator']:  # which is then the choice
        processes = [[options['accelerator']]]
    for found in chain.from_iterable(
        run_isolated(__name__, tasks, options, seconds) for tasks in processes
    ):
        if found.level == 'absent':
            absent.append(found.found)
        else:
            findings.append(found)
    if absent:
        listed = ''.join(f'\n- {each}' for each in absent)
        findings.append(section.note(f'not there: {len(absent)} others{listed}'))
    return findings


def accelerator_options(
    cfg: Optional[AnyConfig], accelerator: Optional[str]
) -> AcceleratorOptions:
    """Read the config key ``accelerator``, whose name ``accelerator`` replaces if given."""
    given = None if cfg is None else cfg.get('accelerator')
    # The section *config* reports the problems.
    options = AcceleratorOptions.from_config(given, problems=[], backend='auto')
    same = isinstance(options.device, dict) and options.device.get('type') == accelerator
    if accelerator is None or same:
        return options
    return replace(options, device=dict(type=accelerator))


def work(task: str, options: TaskOptions, say: Callable[[str], None]) -> Iterator[Finding]:
    """Examine one family; see :mod:`mmdevplug.checks.isolated`."""
    say('loading the config')
    cfg = None
    try:
        if options['config'] is not None:
            cfg = Config.fromfile(options['config'])
    except Exception as error:
        # The section of the config says more.
        message = f'the config cannot be loaded: {type(error).__name__}: {error}'
        yield section.note(f'{task}: examined without the config; {message}')
    say('looking for devices')
    try:
        device = accelerator_options(cfg, options['accelerator']).device
        if task == CHOICE:
            accelerator, reason = choose_accelerator(device)
            yield section.ok(f'training here uses {accelerator.name!r} ({reason})')
        else:
            device = device if device.get('type') == task else dict(type=task)
            yield from _examine_family(device, bool(options['accelerator']), say)
    except DevPlugError as error:
        yield _broken(f'{task}: {error}')


def _examine_family(
    options: TaskOptions, asked_for: bool, say: Callable[[str], None]
) -> Iterator[Finding]:
    name = options['type']
    known = find_registered(name) is not None
    accelerator = ACCELERATORS.build(options) if known else TorchNativeAccelerator(**options)
    count = accelerator.device_count() if accelerator.is_available() else 0
    if count:
        yield from _examine_devices(accelerator, count, say)
        return
    seen, variable = accelerator.describe_visibility(), accelerator.visible_devices_env
    value = None if variable is None else os.environ.get(variable)
    remedy = '' if value is None else f'unset {variable}'
    if asked_for:
        package = accelerator.package or 'torch'
        found = f'no device ({seen}); it needs {accelerator.requirement()}'
        if find_spec(package.partition('.')[0]) is None:
            found = (
                f'no device: the package {package} is not installed for {sys.executable}. It '
                f"comes with the vendor's software, or in a container of the vendor's"
            )
        if not known:
            try:
                choose_accelerator(options)
            except DevPlugError as error:  # no package has the name
                found = str(error)
        yield section.error(
            f'{name}: {found}',
            'the accelerator that was asked for cannot be used here.',
            remedy
            or f'install what it needs, or take one that is there: --accelerator '
            f'{available_accelerators()[0]}',
        )
    elif value is not None and value.strip() in ('', '-1', 'void'):
        yield section.warning(
            f'{name}: no device is visible ({seen})',
            'the variable hides every device from this process.',
            remedy,
        )
    else:
        yield section.finding('absent', f'{name} (needs {accelerator.requirement()})')


def _examine_devices(
    accelerator: Accelerator, count: int, say: Callable[[str], None]
) -> Iterator[Finding]:
    described = []
    for rank in range(accelerator.max_ranks()):
        say(f'asking for the device of local rank {rank}')
        device = accelerator.device(rank)
        memory = accelerator.memory_total(device)
        size = 'size of memory unknown' if memory is None else format_bytes(memory)
        described.append(f'{device} ({accelerator.device_name(device)}, {size})')
    yield section.ok(
        f'{accelerator.name}: {count} device(s): {", ".join(described)}; '
        f'{accelerator.describe_visibility()}'
    )
    missing = accelerator.missing_functions()
    if missing:
        yield section.note(f'{accelerator.name}: {missing}', 'training works without them.')
    for rank in range(accelerator.max_ranks()):
        yield _probe(accelerator, accelerator.device(rank), say)


def _broken(found: str) -> Finding:
    return section.error(
        found,
        'training on this accelerator fails or computes something else.',
        "MMDEVPLUG_ACCELERATOR=cpu mmdevplug doctor  # then repair the driver or the vendor's "
        'package, or choose another accelerator',
    )


def _probe(accelerator: Accelerator, device: torch.device, say: Callable[[str], None]) -> Finding:
    say(f'computing on {device}')
    try:
        unsupported = probe_device(accelerator, device)
    except DevPlugError as error:
        return _broken(str(error))
    if unsupported:
        return section.note(
            f'{device} computes as the CPU does, but does not keep '
            f'{" and ".join(unsupported)}: values of these dtypes are narrowed to 32 bits, or '
            'refused.',
            'integers of 2**31 and more change there, and float64 is no more exact than float32.',
            'keep such values (ids, time stamps, sums over many pixels) on the host',
        )
    return section.ok(f'{device} computes as the CPU does')
