"""Move modules to a device, and keep shared tensors shared."""

import gc
import sys
import weakref
from contextlib import contextmanager
from itertools import chain
from types import CellType
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mmdevplug.accelerators import Accelerator
from mmdevplug.errors import ModelError, PlacementError

Slot = Tuple[Dict[str, Optional[Tensor]], str]


def check_materialized(module: nn.Module, lazy_allowed: bool = False) -> None:
    """Raise ModelError for the first tensor that holds no values.

    With ``lazy_allowed``, parameters may get their shapes in the first forward pass, as those of
    ``LazyLinear`` do.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
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
    for each place that a shared parameter occurs at; here they stay the same objects, see
    :func:`keep_parameters`. Data preprocessors inside get the device, too. The module is changed
    in place and returned.

    Raises:
        ModelError: If something stays behind, e.g. because a submodule overrides ``_apply``.
    """
    if not misplaced_tensors(module, device):
        set_preprocessor_devices(module, device)
        return module
    shared, plan = _shared_slots(module), getattr(module, 'device_plan', None)
    with keep_parameters(module):
        if plan is None:
            module.to(device)
        else:
            place_by_plan(module, plan)
    _tie(shared)
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
    """Map the parameters, buffers and data preprocessors that are elsewhere to where they are.

    Where the module has a plan, parameters and buffers that are not where the plan has them.
    """
    found = {}
    plan = getattr(module, 'device_plan', None)  # that it was dispatched by
    for name, tensor, _ in misplaced_by_plan(module, plan, device):
        found[name] = tensor.device
    for name, part in module.named_modules():
        if _is_preprocessor(part) and not same_device(part.device, device):
            found[f'{name or type(part).__name__} (data preprocessor)'] = part.device
    return found


def describe_misplaced(found: Dict[str, torch.device]) -> str:
    """Name the first eight of them."""
    named = [f'{name} on {device}' for name, device in list(found.items())[:8]]
    more = len(found) - len(named)
    return ', '.join(named) + (f' and {more} more' if more > 0 else '')


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are the same; a missing index stands for 0, as the CPU has none."""
    one, other = torch.device(one), torch.device(other)
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def misplaced_by_plan(
    model: nn.Module, plan: Any, device: Optional[torch.device] = None
) -> Iterator[Tuple[str, Tensor, torch.device]]:
    """Yield the name, the tensor and the planned device of each tensor that is elsewhere.

    Without a plan, ``device`` is the planned device of all.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        planned = device if plan is None else plan.device_of(name)
        if not same_device(tensor.device, planned):
            yield name, tensor, planned


def place_by_plan(model: nn.Module, plan: Any) -> None:
    """Move each parameter and buffer that is not where the plan has it; refuse if one stays."""
    from accelerate.utils import set_module_tensor_to_device

    shared = _shared_slots(model)
    for name, _, planned in list(misplaced_by_plan(model, plan)):
        set_module_tensor_to_device(model, name, planned)
    _tie(shared)
    left = {name: tensor.device for name, tensor, _ in misplaced_by_plan(model, plan)}
    if left:
        raise PlacementError(
            f'after dispatching {type(model).__name__}, these are not where the plan has them: '
            f'{describe_misplaced(left)}. Put them into a module that must not be split: '
            f"model_parallel=dict(no_split=['...'])."
        )


@contextmanager
def keep_parameters(model: nn.Module) -> Iterator[None]:
    """Keep the parameters that are replaced meanwhile, with the values and devices of the new.

    Gradients, hooks and attributes move along, and shared parameters stay shared. Where this
    PyTorch cannot keep a parameter, what refers to it refers to the new one.
    """
    slots = [(p, n) for p, n in _slots(model) if isinstance(p[n], nn.Parameter)]
    held = [place[name] for place, name in slots]
    yield
    kept: Dict[int, Tensor] = {}
    for (place, name), old in zip(slots, held):
        new = place[name]
        if id(old) not in kept:
            kept[id(old)] = old if new is old or _take_over(old, new) else new
        place[name] = kept[id(old)]
    lost = [old for old in held if kept[id(old)] is not old]
    _redirect(lost, [kept[id(old)] for old in lost])


def _take_over(old: Tensor, new: Tensor) -> bool:
    """Make a parameter what its moved copy is; False where this PyTorch cannot."""
    gradient, old.grad = old.grad, None
    if gradient is not None:
        new.grad = gradient.to(new.device)
    if type(old) is nn.Parameter and torch._has_compatible_shallow_copy_type(old, new):
        old.data, old.grad = new.data, new.grad
        return True
    _carry_over(old, new)
    try:
        if weakref.getweakrefs(old) and old._use_count() == 1:
            # swap_tensors refuses, although weak references then stay valid.
            torch._C._swap_tensor_impl(old, new)
        else:
            torch.utils.swap_tensors(old, new)
    except (AttributeError, RuntimeError):  # before PyTorch 2.3, or something holds its memory
        return False
    return True


def _carry_over(old: Tensor, new: Tensor) -> None:
    """Give a copy of a tensor what hangs on the tensor besides its values."""
    if type(new) is nn.Parameter and not is_lazy(old):
        new.__class__ = type(old)
    for name, value in vars(old).items():
        vars(new).setdefault(name, value)
    if new.requires_grad is not old.requires_grad:
        new.requires_grad_(old.requires_grad)
    for name in ('_backward_hooks', '_post_accumulate_grad_hooks'):
        hooks = getattr(old, name, None)
        if hooks is not None and hooks is not getattr(new, name):
            setattr(new, name, hooks)  # autograd then calls those of this dictionary


def _redirect(old: Sequence[object], new: Sequence[object]) -> None:
    """Let containers, objects and closures that refer to some objects refer to others."""
    if not old:
        return
    new_of, tuples = {id(each): other for each, other in zip(old, new)}, []
    for holder in gc.get_referrers(*old):
        if type(holder) is tuple:
            tuples.append(holder)
        elif isinstance(holder, list):
            if holder is not old:
                holder[:] = [new_of.get(id(each), each) for each in holder]
        elif isinstance(holder, set):
            for each in [each for each in holder if id(each) in new_of]:
                holder.remove(each)
                holder.add(new_of[id(each)])
        elif isinstance(holder, CellType):
            holder.cell_contents = new_of[id(holder.cell_contents)]
        else:
            place = holder if isinstance(holder, dict) else getattr(holder, '__dict__', {})
            for key, value in list(place.items()):
                if id(key) in new_of:
                    place[new_of[id(key)]] = place.pop(key)
                elif id(value) in new_of:
                    place[key] = new_of[id(value)]
    _redirect(tuples, [tuple(new_of.get(id(each), each) for each in held) for held in tuples])


def _slots(module: nn.Module) -> List[Slot]:
    return [
        (place, name)
        for part in module.modules()
        for place in (part._parameters, part._buffers)
        for name, tensor in place.items()
        if tensor is not None
    ]


def _shared_slots(module: nn.Module) -> List[List[Slot]]:
    """The places that hold the same tensor, for every tensor held more than once."""
    by_tensor: Dict[int, List[Slot]] = {}
    for place, name in _slots(module):
        by_tensor.setdefault(id(place[name]), []).append((place, name))
    return [slots for slots in by_tensor.values() if len(slots) > 1]


def _tie(shared: List[List[Slot]]) -> None:
    """Put what the first of some places holds into the others."""
    for slots in shared:
        first_place, first_name = slots[0]
        for place, name in slots[1:]:
            place[name] = first_place[first_name]


def set_preprocessor_devices(module: nn.Module, device: torch.device) -> None:
    """Set the device to which the data preprocessors in a module move batches."""
    for part in module.modules():
        if _is_preprocessor(part):
            part._device = device


def _is_preprocessor(part: nn.Module) -> bool:
    # There is none where nobody has imported MMEngine's models.
    models = sys.modules.get('mmengine.model')
    return models is not None and isinstance(part, models.BaseDataPreprocessor)


@contextmanager
def weights_on_host(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Put the weights of a module on the host for a while, then copy them back to the device.

    For initialization: on a lazy device each ``normal_`` would be a small graph, and the random
    numbers would differ from the CPU's. The parameters keep their identity, so optimizers that
    hold them stay valid.
    """
    slots = _slots(module)
    held = [place[name] for place, name in slots]
    on_device = [t for t in {id(t): t for t in held}.values() if t.device.type != 'cpu']
    copies = accelerator.copies.to_host(on_device)
    for index, tensor in enumerate(on_device):
        if isinstance(tensor, nn.Parameter):
            copies[index] = nn.Parameter(copies[index], tensor.requires_grad)
        _carry_over(tensor, copies[index])
    on_host = {id(tensor): copy for tensor, copy in zip(on_device, copies)}
    for (place, name), tensor in zip(slots, held):
        place[name] = on_host.get(id(tensor), tensor)
    counts = [sys.getrefcount(copy) for copy in copies]
    try:
        yield
        kept = [sys.getrefcount(copy) > count for copy, count in zip(copies, counts)]
        on_host = {id(tensor): place[name] for (place, name), tensor in zip(slots, held)}
    finally:
        for (place, name), tensor in zip(slots, held):
            place[name] = tensor
    results = [on_host[id(tensor)] for tensor in on_device]
    with torch.no_grad():
        accelerator.copies.into_device(results, on_device)
    for tensor, result in zip(on_device, results):
        vars(tensor).update(vars(result))
        _carry_over(result, tensor)
    of_others = [i for i, result in enumerate(results) if kept[i] or result is not copies[i]]
    _redirect([results[i] for i in of_others], [on_device[i] for i in of_others])
