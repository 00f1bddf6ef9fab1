"""Refuse a loss that trains nothing before ranks wait for each other's gradients."""

from typing import Any, List, Set

import torch
from torch import Tensor, nn

from mmdevplug.errors import ModelError


def check_loss(loss: Tensor, module: nn.Module) -> None:
    """Raise ModelError if there is no path from the loss to a parameter of the module."""
    if isinstance(loss, Tensor) and loss.requires_grad and _reaches_parameter(loss, module):
        return
    found = (
        'it is no tensor'
        if not isinstance(loss, Tensor)
        else 'loss.requires_grad is False'
        if not loss.requires_grad
        else 'its graph ends in other tensors'
    )
    raise ModelError(
        f'the loss of {type(module).__name__} reaches none of its parameters ({found}), so '
        f'nothing would be trained. Expected a sum of entries named "...loss...", computed '
        f"from the model's parameters: look for detach(), torch.no_grad(), .data or .item() "
        f'between model and loss, and for frozen parameters.'
    )


def _reaches_parameter(loss: Tensor, module: nn.Module) -> bool:
    """Search the autograd graph depth first, until the first parameter."""
    parameters = set(map(id, module.parameters()))
    if loss.grad_fn is None:
        return id(loss) in parameters
    seen: Set[object] = set()
    pending: List[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, 'variable', None)) in parameters:
            return True
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True  # e.g. a checkpointed segment, whose parameters its graph does not show
        for following, _ in node.next_functions:
            pending.append(following)
    return False
