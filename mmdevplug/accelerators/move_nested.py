"""Move nested containers of tensors to a device in one call."""

from typing import Any, Dict, List, Sequence, Union

import torch
from torch import Tensor

from mmdevplug.utils.pytree import replace_parts, tensors_in

from .base import Accelerator
from .context import current_accelerator
from .cpu import CPUAccelerator


def to_device(nested: object, device: Union[str, torch.device]) -> Any:
    """Move all tensors in nested containers to a device.

    One call copies all of them between host and device. Tensors that require gradients are copied
    one by one, within the graph of autograd.

    Args:
        nested: Dicts, lists, tuples, dataclasses and data elements; anything else stays as it is.
        device (str or torch.device): The target device.

    Returns:
        Any: The same structure; the same object if nothing in it had to move.

    Examples:
        >>> to_device(dict(image=torch.zeros(3, 8, 8), name='a'), 'cpu')['name']
        'a'
    """
    device = torch.device(device)
    if device.type != 'cpu' and device.index is None:
        device = torch.empty(0, device=device).device
    elsewhere = {id(t): t for t in tensors_in(nested) if t.device != device}
    if not elsewhere:
        return nested
    moved = dict(zip(elsewhere, move_tensors(list(elsewhere.values()), device)))
    return replace_parts(nested, lambda tensor: moved.get(id(tensor), tensor))


def move_tensors(tensors: Sequence[Tensor], device: torch.device) -> List[Tensor]:
    """Copy tensors to a device, in one call for those of the same source."""
    result: List[Tensor] = list(tensors)
    by_source: Dict[torch.device, List[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.requires_grad or 'cpu' not in (tensor.device.type, device.type):
            result[index] = tensor.to(device)
        elif tensor.device != device:
            by_source.setdefault(tensor.device, []).append(index)
    for source, indices in by_source.items():
        chosen = [tensors[index] for index in indices]
        if device.type == 'cpu':
            copies = accelerator_for(source.type).copies.to_host(chosen)
        else:
            copies = accelerator_for(device.type).copies.to_device(chosen, device)
        for index, copy in zip(indices, copies):
            result[index] = copy
    return result


def accelerator_for(device_type: str) -> Accelerator:
    """The accelerator that copies between the host and devices of a type."""
    if device_type != 'cpu':
        current = current_accelerator()
        if current.device_type == device_type:
            return current
    # It copies with PyTorch's own functions, which work for any device.
    return CPUAccelerator()
