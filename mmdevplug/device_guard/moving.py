"""Move the operands of an operation to one device, with the fewest bytes."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .operands import Found, Place, replace_tensors
from .rules import Call, is_written


class Moves(NamedTuple):
    """The arguments of an operation after the moves, and what moved."""

    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    number: int
    bytes: int


def move_operands(call: Call, groups: Sequence[List[Found]]) -> Optional[Moves]:
    """Copy operands so that each group is on one device.

    What is written to stays, or else the result would be lost in a copy. The copies are part of
    the graph of autograd, which brings each gradient back to where the operand was.

    Args:
        call (Call): The operation.
        groups (list): The operands that must meet, group by group.

    Returns:
        Moves, optional: None if no copies help: the operands that are written to are on several
        devices, one operand is needed on two, or one has no data (``meta``).
    """
    targets: Dict[Place, torch.device] = {}
    tensors: Dict[Place, Tensor] = {}
    for group in groups:
        target = _target(call, group)
        for each in group:
            if target is None or targets.setdefault(each.place, target) != target:
                return None
            tensors[each.place] = each.tensor
    copies: Dict[Tuple[int, torch.device], Tensor] = {}
    new: Dict[Place, Tensor] = {}
    for place, tensor in tensors.items():
        target = targets[place]
        if tensor.device == target:
            continue
        if 'meta' in (tensor.device.type, target.type):
            return None
        key = id(tensor), target
        if key not in copies:
            copies[key] = tensor.to(target)
        new[place] = copies[key]
    size = sum(size_of(copy) for copy in copies.values())
    return Moves(*replace_tensors(call.args, call.kwargs, new), len(copies), size)


def size_of(tensor: Tensor) -> int:
    """The bytes that travel when a tensor does."""
    return tensor.numel() * tensor.element_size()


def _target(call: Call, group: Sequence[Found]) -> Optional[torch.device]:
    """Where a group meets; None if its members that must stay are apart."""
    devices = dict.fromkeys(each.tensor.device for each in group)
    if len(devices) == 1:
        return group[0].tensor.device
    fixed = {each.tensor.device for each in group if is_written(call, each)}
    if fixed:
        return fixed.pop() if len(fixed) == 1 else None
    sizes = {id(each.tensor): (each.tensor.device, size_of(each.tensor)) for each in group}
    here = {
        device: sum(size for other, size in sizes.values() if other == device)
        for device in devices
    }
    # The first of equals, so that the choice is the same in every step.
    return max(_candidates(group, list(devices)), key=lambda device: here[device])


def _candidates(group: Sequence[Found], devices: List[torch.device]) -> List[torch.device]:
    """All devices, but not the CPU where an accelerator would lose its computation to it.

    A single batch that was left on the CPU would otherwise draw the whole model there, layer by
    layer. Indices and masks are no computation: they may go to a table on the CPU.
    """
    accelerators = [device for device in devices if device.type != 'cpu']
    computes = any(
        each.tensor.is_floating_point() or each.tensor.is_complex()
        for each in group
        if each.tensor.device.type != 'cpu'
    )
    return accelerators if computes else devices
