"""Make a plan of which device holds which part of a model, by one of three methods."""

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Union

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mmdevplug.errors import PlacementError, first_line
from mmdevplug.utils.logs import log_warning, quiet

from .best_split import fit
from .device_plan import WARNING, DevicePlan, PlannedBlock, signature_of
from .evenness import describe_unevenness, idle_devices
from .parse_devices import Devices, Size, parse_devices, parse_max_memory
from .sizes import as_dtype, module_sizes
from .units import Unit, find_units, group_units, shared_names
from .unsplittable import WholeModules
from .walk_modules import named_tensors, nearest, prefixes

STRATEGIES = ('auto', 'balanced', 'dynamic')
#: For accelerate, where a device has no limit.
_PLENTY = 2**60


class PlanOptions(NamedTuple):
    """Arguments of :func:`plan` besides the model and the devices."""

    strategy: str = 'balanced'
    max_memory: Union[None, str, Mapping[object, Size]] = None
    no_split: Union[None, str, Iterable[str]] = None
    balance_threshold: float = 0.3
    force_balance: Optional[bool] = None
    exclude_cpu: bool = True
    dtype: Union[None, str, torch.dtype] = None
    training: bool = False
    optimizer: Union[str, int, float] = 'adamw'
    device_type: Optional[str] = None

    def check(self) -> None:
        """Refuse values that fit no model."""
        if self.strategy not in STRATEGIES:
            raise PlacementError(
                f'strategy={self.strategy!r}: expected one of {", ".join(map(repr, STRATEGIES))}.'
            )
        threshold = self.balance_threshold
        number = isinstance(threshold, (int, float)) and threshold is not True
        if not number or not 0 <= threshold <= 1:
            raise PlacementError(f'balance_threshold={threshold!r}: expected 0 to 1.')
        if self.force_balance not in (None, True, False):
            raise PlacementError(
                f'force_balance={self.force_balance!r}: expected None, True or False.'
            )


def make_plan(model: nn.Module, devices: Devices, options: PlanOptions) -> DevicePlan:
    """Plan as :func:`plan` does, which also logs the warning of an uneven plan."""
    options.check()
    job = _Job(model, parse_devices(devices, options.device_type, options.exclude_cpu), options)
    planners = dict(auto=job.auto, balanced=job.balanced, dynamic=job.dynamic)
    return job.checked(planners[options.strategy]())


def plan(
    model: nn.Module, devices: Devices, strategy: str = 'balanced', **options: Any
) -> DevicePlan:
    """Decide which device holds which part of a model. No device need be present.

    A warning is logged for an uneven plan, which is also in its ``steps``.

    Args:
        model (nn.Module): Any, on any device, also the meta device. It is not changed.
        devices (str, int or list): ``'cuda:0-3'``, a list, or a number of ``device_type``.
        strategy (str): ``'auto'`` is HF accelerate's ``infer_auto_device_map``; ``'balanced'`` the
            best contiguous split in order of registration; ``'dynamic'`` the first where it is
            even enough, else the second.
        max_memory (dict or str, optional): Bytes, or figures as ``'10GB'``, of devices or their
            indices. Devices get loads in proportion. Defaults to None: equal devices.
        no_split (Iterable[str], optional): Classes or modules that must stay whole, besides those
            that are found (see :class:`WholeModules`).
        balance_threshold (float): Imbalance, 0 to 1, above which a plan is uneven.
        force_balance (bool, optional): None: every device has to hold something, and an uneven
            plan is warned of. True: an uneven plan is refused. False: a device that is too small
            or not needed may be left out. Defaults to None.
        exclude_cpu (bool): If False, the host takes, last, what the devices cannot hold.
        dtype (torch.dtype or str, optional): What floating tensors will be cast to.
        training (bool): Whether to count gradients and the state of the optimizer.
        optimizer (str or number): As for :func:`mmdevplug.model_parallel.module_sizes`.
        device_type (str, optional): Of devices given as numbers.

    Returns:
        DevicePlan: The map, its figures, and how it came about.

    Raises:
        PlacementError: If an argument is wrong or the model does not fit, with the figures.
    """
    made = make_plan(model, devices, PlanOptions(strategy, **options))
    if made.warning:
        log_warning(made.warning)
    return made


class _Job:
    """A model, its devices, and the three ways to plan."""

    def __init__(self, model: nn.Module, devices: List[str], options: PlanOptions) -> None:
        self.limits = parse_max_memory(options.max_memory, devices)
        if next(model.parameters(), None) is None:
            raise PlacementError(
                f'{type(model).__name__} has no parameters: there is nothing to spread.'
            )
        self.tensors = named_tensors(model)
        lazy = [name for name, tensor in self.tensors if is_lazy(tensor)]
        if lazy:
            raise PlacementError(
                f'{", ".join(lazy[:4])} of {type(model).__name__} has no shape yet. Run the model '
                f'once, then plan.'
            )
        self.model, self.devices = model, devices
        self.strategy, self.dtype = options.strategy, as_dtype(options.dtype)
        force = options.force_balance
        self.force_balance = force if force is None else bool(force)
        self.threshold = options.balance_threshold
        #: Whether the last plan is the best split, not accelerate's map.
        self._is_best = True
        self.whole = WholeModules(model, options.no_split)
        self.sizes = module_sizes(model, self.dtype, options.training, options.optimizer)
        self.units = find_units(model, self.whole)
        self.groups = group_units(self.units, self.sizes, shared_names(model))
        # Activations that are computed before the first block and kept.
        self.groups[0].bytes += self.sizes[''] - sum(group.bytes for group in self.groups)

    def auto(self) -> DevicePlan:
        """HF accelerate's map, which knows classes that must not be split and weighs weights."""
        device_map = self._infer()
        known = {unit.name: nearest(unit.name, device_map) for unit in self.units}
        split = next((name for name, covered_by in known.items() if covered_by is None), None)
        if split is not None:
            raise PlacementError(
                f'HF accelerate splits {split}, which must stay whole: it knows only classes, '
                f'here {", ".join(self.whole.classes) or "none"}. Use strategy "balanced".'
            )
        device_of = {name: device_map[str(covered_by)] for name, covered_by in known.items()}
        plan = self._finish(device_of, [], device_map)
        over = [
            f'{name} would hold {plan.loads[name]:,} bytes of {limit:,}'
            for name, limit in self.limits.items()
            if plan.loads[name] > limit
        ]
        if over:
            raise PlacementError(
                f"HF accelerate's map exceeds max_memory: {'; '.join(over)} (it counts only "
                f'weights). Use strategy "balanced".'
            )
        self._is_best = False
        plan.steps.append(f'HF accelerate: imbalance {plan.imbalance:.3f}.')
        return plan

    def _infer(self) -> Dict[str, str]:
        """Call ``infer_auto_device_map``, and place what it leaves out."""
        try:
            from accelerate.utils import get_balanced_memory, infer_auto_device_map
        except ImportError as error:
            raise PlacementError(
                f'strategy "auto" needs HF accelerate ({first_line(error)}): pip install '
                f'accelerate torch=={torch.__version__}, or use strategy "balanced".'
            ) from error
        # Indices stand for devices of any type.
        keys: List[Union[int, str]] = [
            name if name == 'cpu' else i for i, name in enumerate(self.devices)
        ]
        memory = {key: self.limits.get(name, _PLENTY) for key, name in zip(keys, self.devices)}
        classes = list(self.whole.classes)
        try:
            with quiet('accelerate.utils.modeling'):  # warns of each absent device
                memory = get_balanced_memory(self.model, memory, classes, self.dtype)
                found = infer_auto_device_map(self.model, memory, classes, self.dtype)
        except Exception as error:
            # It asserts, indexes and divides on models it does not expect.
            raise PlacementError(
                f'HF accelerate fails on {type(self.model).__name__} with '
                f'{type(error).__name__}: {first_line(error)}. Use strategy "balanced".'
            ) from error
        left = [name or 'the whole model' for name, key in found.items() if key not in keys]
        if left:
            raise PlacementError(
                f'HF accelerate finds no room on {", ".join(self.devices)} for '
                f'{", ".join(left[:4])}{" and more" if len(left) > 4 else ""}.'
            )
        named = {name: self.devices[keys.index(key)] for name, key in found.items()}
        for name, _ in self.tensors:  # buffers that a split module holds itself
            if nearest(name, named) is None:
                owner = name.rpartition('.')[0]
                near = [
                    nearest(unit.name, named)
                    for unit in self.units
                    if not owner or unit.name.startswith(f'{owner}.')
                ]
                beside = next((each for each in near if each is not None), next(iter(named)))
                named[name] = named[beside]
        return named

    def balanced(self) -> DevicePlan:
        """The best contiguous split."""
        full = self.force_balance is not False
        devices, steps = fit(self.groups, self.devices, self.limits, full)
        device_of = {
            unit.name: device
            for group, device in zip(self.groups, devices)
            for unit in group.units
        }
        plan = self._finish(device_of, steps)
        plan.steps.append(
            f'best contiguous split of {len(self.groups)} blocks: imbalance {plan.imbalance:.3f}.'
        )
        return plan

    def dynamic(self) -> DevicePlan:
        """HF accelerate's map where it is even enough, else the best split."""
        try:
            first = self.auto()
        except PlacementError as error:
            made = self.balanced()
            made.steps[:] = [f'auto failed: {error}', *made.steps, 'balanced is used.']
            return made
        idle = self.force_balance is not False and idle_devices(first)
        if first.imbalance <= self.threshold and not idle:
            first.steps.append(f'that is within the threshold {self.threshold:g}: auto is used.')
            return first
        try:
            second = self.balanced()
        except PlacementError as error:
            # A model that fits on no card may be meant for the host.
            if idle and (self.force_balance or not first.loads.get('cpu')):
                raise
            first.steps.append(f'balanced failed, auto is used: {error}')
            return first
        self._is_best = True
        # Both name what was opened.
        steps = [*first.steps, *second.steps, 'auto is not even enough: balanced is used.']
        second.steps[:] = dict.fromkeys(steps)
        return second

    def checked(self, plan: DevicePlan) -> DevicePlan:
        """Refuse an uneven plan, or add a warning to its steps."""
        problem = describe_unevenness(plan, self.groups, self.threshold, self._is_best)
        if problem and self.force_balance:
            raise PlacementError(f'force_balance=True refuses a plan that is {problem}')
        if problem:
            plan.steps.append(f'{WARNING}{problem}')
        return plan

    def _finish(
        self,
        device_of: Mapping[str, str],
        steps: List[str],
        device_map: Optional[Mapping[str, str]] = None,
    ) -> DevicePlan:
        size_of = {unit.name: self.sizes[unit.name] for unit in self.units}
        # Bytes that are kept before the first block runs.
        size_of[self.units[0].name] += self.sizes[''] - sum(size_of.values())
        loads = dict.fromkeys(self.devices, 0)
        for name, size in size_of.items():
            loads[device_of[name]] += size
        blocks = [
            PlannedBlock(unit.name, unit.kind, size_of[unit.name], device_of[unit.name])
            for unit in self.units
            if unit.holds
        ]
        if device_map is None:
            device_map = clean_map(device_of, self.units)
        opened = ', '.join(self.whole.opened)
        if opened:
            steps.insert(0, f'{opened}: split between the blocks that each holds.')
        return DevicePlan(
            device_map=dict(device_map),
            devices=list(self.devices),
            capacities=dict(self.limits) or None,
            loads=loads,
            strategy=self.strategy,
            steps=steps,
            blocks=blocks,
            parts=self.sizes.parts(),
            signature=signature_of(self.tensors),
            model=type(self.model).__name__,
        )


def clean_map(device_of: Mapping[str, str], units: Iterable[Unit]) -> Dict[str, str]:
    """Map the outermost modules that are on one device to it, in order of registration."""
    inside: Dict[str, set] = {}
    for unit in units:
        for prefix in prefixes(unit.name):
            inside.setdefault(prefix, set()).add(device_of[unit.name])
    device_map: Dict[str, str] = {}
    for unit in units:
        name = next(p for p in prefixes(unit.name) if len(inside[p]) == 1)
        device_map[name] = device_of[unit.name]
    return device_map
