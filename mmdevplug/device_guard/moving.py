"""Move the operands of an operation to one device, with the fewest bytes."""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mmdevplug.accelerators import devices_of
from mmdevplug.utils.pytree import tensor_bytes

from .operands import Found, Place, replace_tensors
from .rules import Call, is_written


class Moves(NamedTuple):
    """The arguments of an operation after the moves, and what moved."""

    args: Tuple[object, ...]
    kwargs: Dict[str, object]
    number: int
    bytes: int


def move_operands(call: Call, groups: Sequence[List[Found]]) -> Optional[Moves]:
    """Copy operands so that each group is on one device; None if no copies can do that.

    Operands that the operation writes to stay. Autograd returns each gradient to the device of the
    original operand.
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
    size = sum(tensor_bytes(copy) for copy in copies.values())
    return Moves(*replace_tensors(call.args, call.kwargs, new), len(copies), size)


def _target(call: Call, group: Sequence[Found]) -> Optional[torch.device]:
    """The target device of a group; None if operands that must stay are on several."""
    devices = devices_of(each.tensor for each in group)
    if len(devices) == 1:
        return devices[0]
    fixed = {each.tensor.device for each in group if is_written(call, each)}
    if fixed:
        return fixed.pop() if len(fixed) == 1 else None
    sizes = {id(each.tensor): (each.tensor.device, tensor_bytes(each.tensor)) for each in group}
    here = {
        device: sum(size for other, size in sizes.values() if other == device)
        for device in devices
    }
    # max() takes the first of equals, so the choice is the same in every step.
    return max(_candidates(group, devices), key=lambda device: here[device])


def _candidates(group: Sequence[Found], devices: List[torch.device]) -> List[torch.device]:
    """All devices, without the CPU if that would move computation from an accelerator to it.

    Otherwise one batch on the CPU would move the whole model there, layer by layer. Indices and
    masks may move to a table on the CPU.
    """
    accelerators = [device for device in devices if device.type != 'cpu']
    computes = any(
        each.tensor.is_floating_point() or each.tensor.is_complex()
        for each in group
        if each.tensor.device.type != 'cpu'
    )
    return accelerators if computes else devices
