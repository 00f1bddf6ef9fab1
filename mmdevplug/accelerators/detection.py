"""Choose the accelerator: from the config, then the environment, then what is present."""

import os
import warnings
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import signature
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Union

from mmdevplug.config.accelerator import suggest_option, to_dict
from mmdevplug.config.fields import did_you_mean
from mmdevplug.errors import AcceleratorError
from mmdevplug.registry import ACCELERATORS

from .base import Accelerator, privateuse1_name
from .torch_native import FAMILIES, Family
from .vendor import explain_vendor_errors

ENVIRONMENT_VARIABLE = 'MMDEVPLUG_ACCELERATOR'
#: The group of entry points with which other packages name their accelerators.
ENTRY_POINTS = 'mmdevplug.accelerators'

#: The order in which detection looks: vendors' cards first, the CPU last.
DETECTION_ORDER = (
    *('gcu', 'npu', 'mlu', 'musa', 'sdaa', 'hpu', 'neuron', 'tpu', 'xla'),
    *('cuda', 'xpu', 'mps', 'cpu'),
)

AcceleratorConfig = Union[str, Mapping[str, object], Accelerator, None]


class Choice(NamedTuple):
    """An accelerator and the reason for it."""

    accelerator: Accelerator
    reason: str


def choose_accelerator(config: AcceleratorConfig = None) -> Choice:
    """Choose an accelerator and say why.

    Args:
        config (str, dict or Accelerator, optional): A name, or a dict with ``type`` and the
            arguments of that accelerator. None, ``'auto'`` and a dict without ``type`` leave the
            choice to ``MMDEVPLUG_ACCELERATOR`` and then to detection. Defaults to None.

    Returns:
        Choice: The accelerator and the reason.

    Raises:
        AcceleratorError: If the accelerator is unknown, not usable or broken, or if there are
            arguments but no name.
    """
    if isinstance(config, Accelerator):
        return Choice(config, 'given as an object')
    options = to_dict(config)
    name = options.pop('type', None) or 'auto'
    if name != 'auto':
        return Choice(
            _build_usable(name, options, 'accelerator.type'), f'accelerator.type={name!r}'
        )
    name = os.environ.get(ENVIRONMENT_VARIABLE, '').strip() or 'auto'
    if name != 'auto':
        accelerator = _build_usable(name, options, ENVIRONMENT_VARIABLE)
        return Choice(accelerator, f'environment variable {ENVIRONMENT_VARIABLE}={name}')
    if options:
        raise AcceleratorError(
            f'accelerator has {", ".join(sorted(options))}: no option of training, and no '
            f'argument of an accelerator, since none is named{suggest_option(options, ["type"])} '
            f'Correct the name, remove it, or name the accelerator that takes it: '
            f"accelerator=dict(type='gcu', ...)."
        )
    return _detect()


def get_accelerator(config: AcceleratorConfig = 'auto') -> Accelerator:
    """Get an accelerator with at least one device; see :func:`choose_accelerator`.

    Examples:
        >>> get_accelerator('cpu').device(local_rank=1)
        device(type='cpu')
    """
    return choose_accelerator(config).accelerator


def available_accelerators() -> List[str]:
    """The names of the accelerators that this process can use, in order of preference.

    A vendor's package that is installed but broken is warned about and left out.
    """
    return [accelerator.name for accelerator in _usable_accelerators()]


#: What people call some of them.
_OTHER_NAMES = dict(gpu='cuda', nvidia='cuda', ascend='npu', enflame='gcu', cambricon='mlu')


def _build(name: str, options: Mapping[str, object], origin: str) -> Accelerator:
    """Build an accelerator; report options that it does not take, and errors inside it."""
    kind = find_registered(name)
    if kind is None and (name == privateuse1_name() or {'package', 'register'} & options.keys()):
        from .torch_native import TorchNativeAccelerator

        kind = partial(TorchNativeAccelerator, name)
    if kind is None:
        other = _OTHER_NAMES.get(name.lower())
        meant = f'; did you mean {other!r}?' if other else did_you_mean([name], registered_names())
        raise AcceleratorError(
            f'{origin} names the accelerator {name!r}, which is unknown{meant} Known: '
            f'{", ".join(sorted(registered_names()))}; usable here: '
            f'{", ".join(available_accelerators())}. Correct the name; for a device that a vendor '
            f'registers with PyTorch under that name, import its package first: '
            f'accelerator=dict(type={name!r}, package=...).'
        )
    try:
        signature(kind).bind(**options)
    except TypeError as error:
        raise AcceleratorError(
            f'accelerator=dict(type={name!r}, ...) has an option it does not take: {error}'
            f'{suggest_option(options, signature(kind).parameters)} Given: {sorted(options)}. '
            f'Correct the name or remove it; docs/en/options.md lists the options.'
        ) from error
    with explain_vendor_errors(f'building accelerator {name!r}', 'Correct that class'):
        return kind(**options)


def find_registered(name: str) -> Optional[Callable]:
    """Find what builds an accelerator: registered here, or by a package with an entry point.

    Raises:
        AcceleratorError: If the entry point of that name cannot be loaded or registers nothing.
    """
    if name in ACCELERATORS.module_dict:
        return ACCELERATORS.module_dict[name]
    found = _entry_points().get(name)
    if found is not None:
        origin = f'the entry point {name} = {found.value} of the group {ENTRY_POINTS!r}'
        with explain_vendor_errors(origin, 'Correct or uninstall the package that has it'):
            loaded = found.load()
        # Loading a module, or the class in it, may have registered it.
        if callable(loaded) and name not in ACCELERATORS.module_dict:
            ACCELERATORS.register_module(name=name, module=loaded)
        if name not in ACCELERATORS.module_dict:
            raise AcceleratorError(
                f'{origin} registers no accelerator {name!r}. Expected a subclass of Accelerator, '
                f'or a module that registers one under that name; correct the package that has it.'
            )
        return ACCELERATORS.module_dict[name]
    return None


def registered_names() -> List[str]:
    """The names of all registered accelerators, those of other packages included."""
    known = [*DETECTION_ORDER, *ACCELERATORS.module_dict, *_entry_points()]
    return list(dict.fromkeys(known))


def _entry_points() -> Dict[str, Any]:
    found = entry_points()
    if hasattr(found, 'select'):
        return {each.name: each for each in found.select(group=ENTRY_POINTS)}
    return {each.name: each for each in found.get(ENTRY_POINTS, ())}  # before Python 3.10


def _is_usable(accelerator: Accelerator) -> bool:
    """Whether there is a device.

    Raises:
        AcceleratorError: If the vendor's driver fails.
    """
    asked = f'asking accelerator {accelerator.name!r} for its devices'
    with explain_vendor_errors(asked, 'Check the driver', accelerator):
        return accelerator.is_available() and accelerator.device_count() > 0


def is_missing(name: str) -> bool:
    """Whether no accelerator has a name, or the package that it needs is not installed.

    Imports no package of a vendor. A config may still register what is missing.
    """
    if name in ('auto', privateuse1_name()) or name in _entry_points():
        return False
    kind = find_registered(name)
    family = FAMILIES.get(name, Family('torch_gcu' if name == 'gcu' else None))
    package = getattr(kind, 'package', None) or family.package
    return kind is None or (package is not None and find_spec(package.split('.')[0]) is None)


def _build_usable(name: str, options: Mapping[str, object], origin: str) -> Accelerator:
    accelerator = _build(name, options, origin)
    if not _is_usable(accelerator):
        raise AcceleratorError(
            f'{origin} names the accelerator {name!r}, but no such device can be used: it needs '
            f'{accelerator.requirement()} ({accelerator.describe_visibility()}). Usable here: '
            f'{", ".join(available_accelerators())}.'
        )
    return accelerator


def _usable_accelerators(failures: Optional[List[str]] = None) -> Iterator[Accelerator]:
    """Yield every usable accelerator in the order of detection, and collect what fails."""
    names = list(DETECTION_ORDER)
    private = privateuse1_name()
    if private is not None and private not in names:
        names.insert(0, private)
    registered = [name for name in registered_names() if name not in names]
    for name in registered + names:
        try:
            accelerator = _build(name, {}, 'detection')
            usable = not accelerator.only_by_name and _is_usable(accelerator)
        except AcceleratorError as error:
            if failures is None:
                warnings.warn(str(error), stacklevel=3)
            else:
                failures.append(str(error))
            continue
        if usable:
            yield accelerator


def _detect() -> Choice:
    failures: List[str] = []
    for accelerator in _usable_accelerators(failures):
        if not accelerator.is_preferred():
            continue
        # Nobody wants to train on the CPU beside a broken card.
        if failures and accelerator.name == 'cpu':
            raise AcceleratorError(
                f'no accelerator is named, and one that is installed here fails, which leaves '
                f'only the CPU. {" ".join(failures)} To train on the CPU, ask for it: '
                f"accelerator='cpu', --accelerator cpu or {ENVIRONMENT_VARIABLE}=cpu."
            )
        for failure in failures:
            warnings.warn(failure, stacklevel=3)
        count = accelerator.device_count()
        return Choice(accelerator, f'detected: {count} {accelerator.name} device(s)')
    raise AcceleratorError('no accelerator is usable, not even the CPU; reinstall torch.')
