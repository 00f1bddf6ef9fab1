"""Section *accelerators*: which families are there, and whether every device computes."""

import os
from typing import Any, Callable, Dict, Iterator, List

from mmdevplug.accelerators import (
    Accelerator,
    TorchNativeAccelerator,
    available_accelerators,
    choose_accelerator,
)
from mmdevplug.accelerators.detection import DETECTION_ORDER
from mmdevplug.errors import DevPlugError
from mmdevplug.registry import ACCELERATORS
from mmdevplug.utils.byte_sizes import format_bytes

from .findings import Finding
from .isolated import Death, run_isolated
from .probes import PROBES, RELATIVE_TOLERANCE, run_probe
from .request import Setting

SECTION = 'accelerators'
STEP_SECONDS = 120.0
CHOICE = 'choice'


def examine(options: Dict[str, Any], seconds: float = STEP_SECONDS) -> List[Finding]:
    """Look at every family, or at the one that was asked for, and try each device.

    Args:
        options (dict): Fields of :class:`mmdevplug.doctor.request.Setting`.
        seconds (float): How long a step may take before it counts as hanging.
    """
    names = [options['accelerator']] if options.get('accelerator') else families()
    findings, absent = [], []
    for told in run_isolated(__name__, [*names, CHOICE], options, seconds):
        if isinstance(told, Death):
            findings.append(_died(told))
        elif told.level == 'absent':
            absent.append(told.found)
        else:
            findings.append(told)
    if absent:
        findings.append(Finding(SECTION, 'note', f'not there: {"; ".join(absent)}'))
    return findings


def families() -> List[str]:
    """The names of all families, those without a vendor's package first.

    A vendor's package may change what is asked of PyTorch afterwards.
    """
    ordered = list(reversed(DETECTION_ORDER))
    return ordered + [name for name in ACCELERATORS.module_dict if name not in ordered]


def work(task: str, options: Dict[str, Any], say: Callable[[str], None]) -> Iterator[Finding]:
    """Look at one family; see :mod:`mmdevplug.doctor.isolated`."""
    say('loading the config')
    setting = Setting(**options)
    try:
        cfg = setting.load()
    except Exception as error:
        # The section of the config says more.
        message = f'the config cannot be loaded: {type(error).__name__}: {error}'
        yield Finding(SECTION, 'note', f'{task}: looked at without the config; {message}')
        cfg = None
    say('looking for devices')
    try:
        wanted = setting.options(cfg).device
        if task == CHOICE:
            yield from _choose(wanted)
        else:
            wanted = wanted if wanted.get('type') == task else dict(type=task)
            yield from _examine_family(wanted, asked_for=bool(setting.accelerator), say=say)
    except DevPlugError as error:
        yield _broken(f'{task}: {error}')


def _choose(options: Dict[str, Any]) -> Iterator[Finding]:
    accelerator, reason = choose_accelerator(options)
    yield Finding(SECTION, 'ok', f'training here uses {accelerator.name!r} ({reason})')


def _examine_family(
    options: Dict[str, Any], asked_for: bool, say: Callable[[str], None]
) -> Iterator[Finding]:
    name = options['type']
    known = name in ACCELERATORS.module_dict
    accelerator = ACCELERATORS.build(options) if known else TorchNativeAccelerator(**options)
    there = accelerator.is_available()
    count = accelerator.device_count() if there else 0
    seen = accelerator.describe_visibility()
    if not count and asked_for:
        yield Finding(
            SECTION,
            'error',
            f'{name}: no device ({seen}); it needs {accelerator.requirement()}',
            'the accelerator that was asked for cannot be used here.',
            _how_to_see(accelerator) or f'--accelerator {available_accelerators()[0]}',
        )
    elif not count and _hides_all(accelerator):
        yield Finding(
            SECTION,
            'warning',
            f'{name}: no device is visible ({seen})',
            'the variable hides every device from this process.',
            _how_to_see(accelerator),
        )
    elif not count:
        yield Finding(SECTION, 'absent', f'{name} (needs {accelerator.requirement()})')
    else:
        yield from _examine_devices(accelerator, count, say)


def _hides_all(accelerator: Accelerator) -> bool:
    variable = accelerator.visible_devices_env
    return variable is not None and os.environ.get(variable, '0').strip() in ('', '-1', 'void')


def _how_to_see(accelerator: Accelerator) -> str:
    variable = accelerator.visible_devices_env
    return f'unset {variable}' if variable is not None and variable in os.environ else ''


def _examine_devices(
    accelerator: Accelerator, count: int, say: Callable[[str], None]
) -> Iterator[Finding]:
    told, devices = [], []
    for index in range(count):
        say(f'asking for device {index}')
        device = accelerator.device(index)
        memory = accelerator.memory_total(device)
        size = 'size of memory unknown' if memory is None else format_bytes(memory)
        told.append(f'{device} ({accelerator.device_name(device)}, {size})')
        devices.append(dict(device=str(device), memory=memory))
    yield Finding(
        SECTION,
        'ok',
        f'{accelerator.name}: {count} device(s): {", ".join(told)}; '
        f'{accelerator.describe_visibility()}',
        data=dict(name=accelerator.name, devices=devices),
    )
    for index in range(count):
        yield _probe(accelerator, index, say)


def _probe(accelerator: Accelerator, index: int, say: Callable[[str], None]) -> Finding:
    device = accelerator.device(index)
    differences, wrong = {}, []
    for name in PROBES:
        say(f'{name} on {device}')
        try:
            accelerator.set_device(device)
            differences[name] = run_probe(name, accelerator, device)
        except Exception as error:
            # Vendors' libraries fail in many ways.
            wrong.append(f'{name} fails with {type(error).__name__}: {error}')
            continue
        # Written so that NaN fails as well.
        if not differences[name] <= RELATIVE_TOLERANCE:
            wrong.append(f'{name} differs by {differences[name]:.2g}')
    data = dict(device=str(device), tolerance=RELATIVE_TOLERANCE)
    if wrong:
        return _broken(f'{device} computes wrongly: {"; ".join(wrong)}', data)
    largest = max(differences.values())
    return Finding(
        SECTION,
        'ok',
        f'{device} computes {", ".join(PROBES)} as the CPU does: largest relative difference '
        f'{largest:.1e}, tolerance {RELATIVE_TOLERANCE:g}',
        data=data,
    )


def _died(death: Death) -> Finding:
    return _broken(death.describe())


def _broken(found: str, data: Any = None) -> Finding:
    return Finding(
        SECTION,
        'error',
        found,
        'training on this accelerator fails or computes something else.',
        "MMDEVPLUG_ACCELERATOR=cpu mmdevplug doctor  # then mend the driver or the vendor's "
        'package, or choose another accelerator',
        data,
    )
