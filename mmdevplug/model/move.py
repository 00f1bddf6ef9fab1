"""Move modules to a device, and keep shared tensors shared."""

from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Tuple

import torch
from mmengine.model import BaseDataPreprocessor
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mmdevplug.accelerators import Accelerator
from mmdevplug.errors import ModelError

from .place_by_plan import misplaced_by_plan, place_by_plan, plan_of

Slot = Tuple[Dict[str, Optional[Tensor]], str]


def check_materialized(module: nn.Module, lazy_allowed: bool = False) -> None:
    """Refuse a module with tensors that hold no values.

    Args:
        module (nn.Module): Any module.
        lazy_allowed (bool): Whether parameters may get their shapes in the first forward pass, as
            those of ``LazyLinear`` do. Defaults to False.

    Raises:
        ModelError: With the name of the first such tensor.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            if lazy_allowed:
                continue
            raise ModelError(
                f'{type(module).__name__}: {name} has no shape yet (a Lazy layer); expected '
                f'parameters with values, which ranks can compare and average. Run the model once '
                f'on a batch before it is wrapped, or give the layer its in_features.'
            )
        if tensor.is_meta:
            raise ModelError(
                f'{type(module).__name__}: {name} is on the device meta and holds no values; '
                f'expected a model with weights. Build it without torch.device("meta"), or call '
                f"model.to_empty(device='cpu') and initialize it."
            )


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device, or each part to its own if the module has a plan.

    ``nn.Module.to`` makes new parameters where the device's tensors are of another kind (XLA), one
    for each place that a shared parameter occurs at; here they stay shared. Data preprocessors
    anywhere inside are told of the device too.

    Args:
        module (nn.Module): Any module; changed in place.
        device (torch.device): Where to.

    Returns:
        nn.Module: The same module.

    Raises:
        ModelError: If something stays behind, e.g. because a submodule overrides ``_apply``.
    """
    if not misplaced_tensors(module, device):
        set_preprocessor_devices(module, device)
        return module
    shared, plan = _shared_slots(module), plan_of(module)
    if plan is None:
        module.to(device)
    else:
        place_by_plan(module, plan)
    for slots in shared:
        first_place, first_name = slots[0]
        for place, name in slots[1:]:
            place[name] = first_place[first_name]
    set_preprocessor_devices(module, device)
    left = misplaced_tensors(module, device)
    if left:
        raise ModelError(
            f'after moving {type(module).__name__} to {device}, these stayed elsewhere: '
            f'{describe_misplaced(left)}. Remove what pins them (an overridden `to` or `_apply`), '
            f'or register them as parameters or buffers.'
        )
    return module


def misplaced_tensors(module: nn.Module, device: torch.device) -> Dict[str, torch.device]:
    """The parameters, buffers and data preprocessors of a module that are not on a device.

    Where the module has a plan, parameters and buffers that are not where the plan has them.

    Returns:
        Dict[str, torch.device]: For each name the device it is on.
    """
    plan = plan_of(module)
    if plan is None:
        found = {
            name: tensor.device
            for named in (module.named_parameters(), module.named_buffers())
            for name, tensor in named
            if not same_device(tensor.device, device)
        }
    else:
        found = {name: tensor.device for name, tensor, _ in misplaced_by_plan(module, plan)}
    for name, part in module.named_modules():
        if isinstance(part, BaseDataPreprocessor) and not same_device(part.device, device):
            found[f'{name or type(part).__name__} (data preprocessor)'] = part.device
    return found


def describe_misplaced(found: Dict[str, torch.device], limit: int = 8) -> str:
    """Name at most ``limit`` of them."""
    named = [f'{name} on {device}' for name, device in list(found.items())[:limit]]
    more = len(found) - len(named)
    return ', '.join(named) + (f' and {more} more' if more > 0 else '')


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are the same; a missing index stands for 0, as the CPU has none."""
    one, other = torch.device(one), torch.device(other)
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _slots(module: nn.Module) -> Iterator[Slot]:
    for part in module.modules():
        for place in (part._parameters, part._buffers):
            for name, tensor in place.items():
                if tensor is not None:
                    yield place, name


def _shared_slots(module: nn.Module) -> List[List[Slot]]:
    """The places that hold the same tensor, for every tensor held more than once."""
    by_tensor: Dict[int, List[Slot]] = {}
    for place, name in _slots(module):
        by_tensor.setdefault(id(place[name]), []).append((place, name))
    return [slots for slots in by_tensor.values() if len(slots) > 1]


def set_preprocessor_devices(module: nn.Module, device: torch.device) -> None:
    """Tell the data preprocessors in a module where batches go."""
    for part in module.modules():
        if isinstance(part, BaseDataPreprocessor):
            part._device = device


@contextmanager
def weights_on_host(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Let a module see its weights on the host, and send what became of them back to the device.

    For initialization: on a lazy device each ``normal_`` would be a small graph, and the random
    numbers would differ from the CPU's. The parameters keep their identity, so optimizers that
    hold them go on working.

    Args:
        module (nn.Module): A module on the accelerator's device.
        accelerator (Accelerator): Copies between device and host, in batched calls.
    """
    slots = list(_slots(module))
    originals = {id(place[name]): place[name] for place, name in slots}
    on_device = [tensor for tensor in originals.values() if tensor.device.type != 'cpu']
    fetched = accelerator.to_host(on_device)
    on_host = {
        id(tensor): nn.Parameter(copy, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else copy
        for tensor, copy in zip(on_device, fetched)
    }
    held = [(place, name, place[name]) for place, name in slots]
    for place, name, tensor in held:
        place[name] = on_host.get(id(tensor), tensor)
    try:
        yield
        results = {id(tensor): place[name] for place, name, tensor in held}
    finally:
        for place, name, tensor in held:
            place[name] = tensor
    with torch.no_grad():
        accelerator.copy_to_device([results[id(tensor)] for tensor in on_device], on_device)
