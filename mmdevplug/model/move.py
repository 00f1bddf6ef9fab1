"""Move modules to a device, and keep shared tensors shared."""

import operator
import sys
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mmdevplug.accelerators import Accelerator
from mmdevplug.errors import ModelError, PlacementError
from mmdevplug.utils.torch_compat import SWAPS_TENSORS

#: A table of a module, whose entries are there, and a name in it.
Slot = Tuple[Dict[str, Any], str]
#: Where a tensor keeps its hooks.
_HOOKS = ('_backward_hooks', '_post_accumulate_grad_hooks')


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
    if not misplaced_tensors(module, device) and not _overrides_to(module):
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


def _overrides_to(module: nn.Module) -> bool:
    """Whether the model has a ``to()`` of its own, which may do more than move tensors."""
    return type(module).to.__module__.split('.')[0] not in ('torch', 'mmengine')


def misplaced_tensors(module: nn.Module, device: torch.device) -> Dict[str, torch.device]:
    """Map the parameters, buffers and data preprocessors that are elsewhere to where they are.

    Where the module has a plan, parameters and buffers that are not where the plan has them.
    """
    misplaced = {}
    plan = getattr(module, 'device_plan', None)  # set by dispatch()
    for name, tensor, _ in misplaced_by_plan(module, plan, device):
        misplaced[name] = tensor.device
    for name, submodule in module.named_modules():
        if _is_preprocessor(submodule) and not same_device(submodule.device, device):
            misplaced[f'{name or type(submodule).__name__} (data preprocessor)'] = submodule.device
    return misplaced


def describe_misplaced(misplaced: Dict[str, torch.device]) -> str:
    """Describe misplaced tensors; name at most eight."""
    named = [f'{name} on {device}' for name, device in list(misplaced.items())[:8]]
    more = len(misplaced) - len(named)
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
        planned: Any = device if plan is None else plan.device_of(name)
        if not same_device(tensor.device, planned):
            yield name, tensor, planned


def place_by_plan(model: nn.Module, plan: object) -> None:
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
    """Keep parameter objects while ``to()`` replaces them: each gets the new data and device.

    Gradients, hooks and attributes move along, and shared parameters stay shared, so optimizers,
    lists and hooks that hold parameters stay valid. PyTorch before 2.3 cannot keep parameters of
    devices whose tensors are of another kind. Then attributes of the model's modules, and hooks
    of its parameters, refer to the new ones, and nothing else does.
    """
    slots = [(p, n) for p, n in _slots(model) if isinstance(p[n], nn.Parameter)]
    old_parameters = [table[name] for table, name in slots]
    yield
    kept: Dict[int, Tensor] = {}
    for (table, name), old in zip(slots, old_parameters):
        new = table[name]
        if id(old) not in kept:
            kept[id(old)] = old if new is old or _take_over(old, new) else new
        table[name] = kept[id(old)]
    refer_to(model, {id(old): kept[id(old)] for old in old_parameters if kept[id(old)] is not old})


def _take_over(old: Tensor, new: Tensor) -> bool:
    """Give a parameter the data, the device and the gradient of its copy; False if impossible."""
    gradient, old.grad = old.grad, None
    if gradient is not None:
        new.grad = gradient.to(new.device)
    if type(old) is nn.Parameter and torch._has_compatible_shallow_copy_type(old, new):
        old.data, old.grad = new.data, new.grad
        return True
    _carry_over(old, new)
    if SWAPS_TENSORS:
        torch._C._swap_tensor_impl(old, new)
    return SWAPS_TENSORS


def _carry_over(old: Any, new: Any) -> None:
    """Copy class, attributes, ``requires_grad`` and hooks of one tensor to another."""
    if type(new) is nn.Parameter and not is_lazy(old):
        new.__class__ = type(old)
    for name, value in vars(old).items():
        vars(new).setdefault(name, value)
    if new.requires_grad is not old.requires_grad:
        new.requires_grad_(old.requires_grad)
    for name in _HOOKS:
        hooks = getattr(old, name, None)
        if hooks is not None and hooks is not getattr(new, name):
            setattr(new, name, hooks)  # shared, so that autograd calls the same hooks


def refer_to(model: nn.Module, new_of: Dict[int, Tensor]) -> None:
    """Replace tensors in attributes of modules, and in what hooks of parameters refer to."""
    if not new_of:
        return
    for submodule in model.modules():
        for name, value in vars(submodule).items():
            if name not in ('_parameters', '_buffers', '_modules'):
                vars(submodule)[name] = _replaced(value, new_of)
    for parameter in model.parameters():
        for name in _HOOKS:
            for hook in (getattr(parameter, name, None) or {}).values():
                for cell in getattr(hook, '__closure__', None) or ():
                    with suppress(ValueError):  # an empty cell
                        cell.cell_contents = _replaced(cell.cell_contents, new_of)


def _replaced(value: Any, new_of: Dict[int, Tensor], levels: int = 4) -> Any:
    """Return a value with tensors replaced; lists, sets and dicts are changed in place."""
    if isinstance(value, Tensor):
        return new_of.get(id(value), value)
    if type(value) not in (tuple, list, set, dict) or not levels:
        return value
    before = list(chain(*value.items()) if type(value) is dict else value)
    after = [_replaced(item, new_of, levels - 1) for item in before]
    if all(map(operator.is_, before, after)):
        return value
    if type(value) is tuple:
        return tuple(after)
    value.clear()
    if type(value) is list:
        value.extend(after)
    else:
        value.update(zip(after[::2], after[1::2]) if type(value) is dict else after)
    return value


def _slots(module: nn.Module) -> List[Slot]:
    return [
        (table, name)
        for submodule in module.modules()
        for table in _tables(submodule)
        for name, tensor in table.items()
        if tensor is not None
    ]


def _tables(part: nn.Module) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    return part._parameters, part._buffers


def _shared_slots(module: nn.Module) -> List[List[Slot]]:
    """Group the slots that hold the same tensor, for each tensor in several slots."""
    by_tensor: Dict[int, List[Slot]] = {}
    for table, name in _slots(module):
        by_tensor.setdefault(id(table[name]), []).append((table, name))
    return [slots for slots in by_tensor.values() if len(slots) > 1]


def _tie(shared: List[List[Slot]]) -> None:
    """Share the tensor of the first slot with the other slots of each group."""
    for slots in shared:
        first_table, first_name = slots[0]
        for table, name in slots[1:]:
            table[name] = first_table[first_name]


def set_preprocessor_devices(module: nn.Module, device: torch.device) -> None:
    """Set the device to which the data preprocessors in a module move batches."""
    for submodule in module.modules():
        if _is_preprocessor(submodule):
            vars(submodule)['_device'] = device


def _is_preprocessor(part: nn.Module) -> bool:
    # There is none where nobody has imported MMEngine's models.
    models = sys.modules.get('mmengine.model')
    return models is not None and isinstance(part, models.BaseDataPreprocessor)


@contextmanager
def weights_on_host(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Put the weights of a module on the host for a while, then copy them back to the device.

    For initialization: on a lazy device each ``normal_`` would be a small graph, and the random
    numbers would differ from the CPU's. The parameters keep their identity, so optimizers, lists
    and hooks that hold them stay valid; see :func:`keep_parameters` for PyTorch before 2.3.
    """
    slots = _slots(module)
    tensors = [table[name] for table, name in slots]
    moved = [t for t in {id(t): t for t in tensors}.values() if t.device.type != 'cpu']
    others = accelerator.copies.to_host(moved)
    for index, tensor in enumerate(moved):
        if isinstance(tensor, nn.Parameter):
            others[index] = nn.Parameter(others[index], tensor.requires_grad)
        _carry_over(tensor, others[index])
    # What the module holds inside of this context: the same tensors, now with data on the host,
    # or copies of them.
    shown = moved if SWAPS_TENSORS else others
    _swap(moved, others)
    by_id = dict(zip(map(id, moved), shown))
    for (table, name), tensor in zip(slots, tensors):
        table[name] = by_id.get(id(tensor), tensor)
    try:
        yield
        found = {id(tensor): table[name] for (table, name), tensor in zip(slots, tensors)}
    except BaseException:
        _swap(moved, others)
        raise
    finally:
        for (table, name), tensor in zip(slots, tensors):
            table[name] = tensor
    results = [found[id(tensor)] for tensor in moved]
    on_device = others if SWAPS_TENSORS else moved
    with torch.no_grad():
        accelerator.copies.into_device(results, on_device)
    for tensor, result in zip(on_device, results):
        vars(tensor).update(vars(result))
        _carry_over(result, tensor)
    _swap(moved, others)
    for tensor, other in zip(moved, others):
        vars(tensor).update(vars(other))
        _carry_over(other, tensor)
    refer_to(module, {id(r): tensor for r, tensor in zip(results, moved) if r is not tensor})


def _swap(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Exchange data and devices of tensors, which stay the same objects, where PyTorch can."""
    if SWAPS_TENSORS:
        for one, other in zip(some, others):
            torch._C._swap_tensor_impl(one, other)
