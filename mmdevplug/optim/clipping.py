"""Clip gradients that are on several devices, with one number to and from each of them."""

from typing import List, Sequence

import torch
from torch import Tensor

from mmdevplug.accelerators import devices_of
from mmdevplug.errors import ModelError


def clip_grad_norm_by_device(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    **_: bool,
) -> Tensor:
    """As :func:`torch.nn.utils.clip_grad_norm_`, for a model that is over several lazy devices.

    PyTorch brings the norm of every parameter to one device, and each costs a lazy device an
    execution. Here each device adds up its own.

    Args:
        parameters (Sequence[Tensor]): With gradients.
        max_norm (float): The largest norm of all gradients together.
        norm_type (float): Which norm. Defaults to 2.
        error_if_nonfinite (bool): Whether a norm that is not finite is refused.

    Returns:
        Tensor: The norm before clipping, of shape (), on the device of the first parameter.

    Raises:
        ModelError: If the norm is not finite and ``error_if_nonfinite`` says so.
    """
    gradients = [parameter.grad for parameter in parameters]
    devices = devices_of(gradients)
    groups = [[g for g in gradients if g.device == device] for device in devices]
    parts = [_norm([_norm([g], norm_type) for g in group], norm_type) for group in groups]
    total = _norm([part.to(devices[0]) for part in parts], norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise ModelError(
            f'optim_wrapper.clip_grad: the norm of order {norm_type} of the gradients is '
            f'{float(total)}; expected a finite number. Look for the cause with '
            f"accelerator.on_nan='stop', or set error_if_nonfinite=False."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for device, group in zip(devices, groups):
        here = factor.to(device)
        for gradient in group:
            gradient.mul_(here.to(gradient.dtype))
    return total


def _norm(tensors: List[Tensor], norm_type: float) -> Tensor:
    """The norm of a tensor, or of numbers that are norms."""
    values = (tensors[0] if len(tensors) == 1 else torch.stack(tensors)).detach()
    # Half precision is added up in float32.
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, norm_type, dtype=dtype)
