"""Measure how much an optimizer keeps for each parameter, by trying it."""

import copy
from typing import Any, Optional, Tuple

import torch
from mmengine.registry import OPTIMIZERS
from torch import nn

from mmdevplug.errors import first_line


def state_factor(options: Any) -> Tuple[Optional[float], str]:
    """Bytes of optimizer state for each byte of parameters, found by a step of a small matrix.

    Args:
        options (dict): ``optim_wrapper.optimizer`` of a config.

    Returns:
        tuple: The number, None if the optimizer cannot be tried alone, and why it cannot.
    """
    if not isinstance(options, dict) or 'type' not in options:
        return None, 'the config has no optim_wrapper.optimizer.type'
    weight = nn.Parameter(torch.zeros(64, 64, device='cpu'))
    weight.grad = torch.ones_like(weight)
    try:
        optimizer = OPTIMIZERS.build(dict(copy.deepcopy(options), params=[weight]))
        optimizer.step()
    except Exception as error:
        # Somebody's optimizer: a closure, a process group or a device may be what it misses.
        return None, f'tried alone it fails with {type(error).__name__}: {first_line(error)}'
    tensors = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
    state = sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)
    return state / (weight.numel() * weight.element_size()), ''
