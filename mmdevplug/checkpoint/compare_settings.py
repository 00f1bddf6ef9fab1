"""Find the settings of optimizers and schedulers in which a checkpoint and a config differ."""

import inspect
from collections import Counter
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

import torch
from torch.optim import Optimizer

from mmdevplug.config.fields import shortened
from mmdevplug.optim.replay_schedulers import base_name

#: What MMEngine's schedulers change while they step.
_PROGRESS = {
    '_global_step',
    '_last_value',
    'base_values',
    'best',
    'cooldown_counter',
    'last_step',
    'num_bad_epochs',
    'verbose',
}
_MOST = 12  # entries of a message


class Difference(NamedTuple):
    """A setting that differs, and whose is taken."""

    name: str
    saved: Any
    configured: Any
    taken: str
    #: The key of the config that has set it, if another.
    because_of: Optional[str] = None

    def describe(self, where: str = '') -> str:
        """Say both values and which is taken."""
        saved, configured = _show(self.saved), _show(self.configured)
        if self.taken == 'checkpoint':
            return f'{self.name}{where}: checkpoint {saved} (taken), config {configured}'
        why = f', as {self.because_of} says' if self.because_of else ''
        return f'{self.name}{where}: checkpoint {saved}, config {configured} (taken{why})'


def describe_differences(differences: List[Difference]) -> str:
    """List differences; those of several groups of parameters that are equal come once."""
    together: Dict[str, List[Difference]] = {}
    for one in differences:
        together.setdefault(one.describe(), []).append(one)
    lines = [
        ones[0].describe(f' ({len(ones)} groups)' if len(ones) > 1 else '')
        for ones in together.values()
    ]
    more = f'; and {len(lines) - _MOST} more' if len(lines) > _MOST else ''
    return '; '.join(lines[:_MOST]) + more


def equal(one: object, other: object) -> bool:
    """Whether two settings are equal; lists and tuples are the same."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu()))
    if callable(one) and callable(other):
        return getattr(one, '__name__', one) == getattr(other, '__name__', other)
    same = one == other
    return bool(same.all() if hasattr(same, 'all') else same)  # arrays of NumPy


def _show(value: object) -> str:
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return getattr(value, '__name__', None) or shortened(value)


# optimizers -------------------------------------------------------------------------------------


def group_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> Set[str]:
    """Name the settings of a group of parameters; the rest are parameters and progress.

    Optimizers such as DAdaptation's and Schedule-Free's count their steps in the groups: in names
    that are not arguments of the class.
    """
    # ZeroRedundancyOptimizer has the groups of the optimizer inside of it.
    arguments = _arguments(type(getattr(optimizer, 'optim', optimizer)))
    return {
        name
        for name in group
        if name not in ('params', 'param_names')
        and (name in arguments or name not in optimizer.defaults)
    }


def compare_groups(
    optimizer: Optimizer, saved: Mapping[str, Any], configured: Mapping[str, Any]
) -> Dict[str, Tuple[Any, Any]]:
    """Return what differs, as pairs of the values that hold before any step of a scheduler."""
    names = group_settings(optimizer, configured)
    one, other = _unscheduled(saved), _unscheduled(configured)
    return {
        name: (one[name], other[name])
        for name in other
        if name in names and name in one and not equal(one[name], other[name])
    }


def _unscheduled(group: Mapping[str, Any]) -> Dict[str, Any]:
    values = {
        name: group.get(base_name(name), value)
        for name, value in group.items()
        if not name.startswith('initial_')
    }
    if 'betas' in values and 'momentum' in values:
        # As MMEngine's schedulers of momentum see Adam's.
        values['betas'] = (values.pop('momentum'), *values['betas'][1:])
    return values


def _arguments(kind: type) -> Set[str]:
    return {
        name
        for each in kind.__mro__
        if '__init__' in vars(each) and each is not object
        for name in inspect.signature(vars(each)['__init__']).parameters
    }


# schedulers -------------------------------------------------------------------------------------


def scheduler_settings(scheduler: Any, state: Mapping[str, Any]) -> Set[str]:
    """Name the settings in the state of a scheduler; the rest is how far it has come."""
    names = set(state) - _PROGRESS
    if type(scheduler).__module__.startswith('mmengine.'):
        return names
    # A class of somebody else's may count in names of its own.
    return names & _arguments(type(scheduler))


def compare_schedulers(
    scheduler: Any, saved: Mapping[str, Any], configured: Mapping[str, Any]
) -> Set[str]:
    """Name the settings that differ."""
    return {
        name
        for name in scheduler_settings(scheduler, configured)
        if name in saved and not equal(saved[name], configured[name])
    }


def worth_saying(scheduler: Any, names: Set[str]) -> List[str]:
    """Leave out what a scheduler derives from its arguments, unless nothing else is left."""
    return sorted(names & _arguments(type(scheduler))) or sorted(names)


def is_same_kind(
    scheduler: Any, configured: Mapping[str, Any], saved: Mapping[str, Any], kind: Optional[str]
) -> bool:
    """Whether a scheduler can go on from a state, of a class ``kind`` if that is known."""
    if kind is not None:
        same = kind == type(scheduler).__name__
    else:
        same = scheduler_settings(scheduler, configured) == scheduler_settings(scheduler, saved)
    return same and configured.get('param_name') == saved.get('param_name')
