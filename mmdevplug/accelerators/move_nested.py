"""Move nested containers of tensors to a device in one call."""

from typing import Any, Dict, List, Optional, Sequence, Union

import torch
from torch import Tensor

from mmdevplug.utils.pytree import replace_parts, tensors_in

from .base import Accelerator
from .context import current_accelerator
from .cpu import CPUAccelerator


def to_device(nested: Any, device: Union[str, torch.device]) -> Any:
    """Move all tensors in nested containers to a device.

    They travel between host and device in one call; those that are there already cost nothing.
    Tensors that require gradients move one by one, so that gradients find back.

    Args:
        nested: Containers, see :func:`container_of`, and anything else, which stays as it is.
        device (str or torch.device): Where to.

    Returns:
        Any: The same structure; the very same object if all of it was there.

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
    """Copy tensors to a device, in one call for those that take the same way.

    Args:
        tensors (Sequence[Tensor]): On any devices.
        device (torch.device): With an index, unless it is the host.
    """
    result: List[Tensor] = list(tensors)
    if all(tensor.device == device for tensor in tensors):
        return result
    ways: Dict[Optional[torch.device], List[int]] = {}
    for index, tensor in enumerate(tensors):
        single = tensor.requires_grad or 'cpu' not in (tensor.device.type, device.type)
        ways.setdefault(None if single else tensor.device, []).append(index)
    for source, indices in ways.items():
        chosen = [tensors[index] for index in indices]
        if source is None:
            copies = [tensor.to(device) for tensor in chosen]
        elif source == device:
            copies = chosen
        elif device.type == 'cpu':
            copies = accelerator_for(source.type).to_host(chosen)
        else:
            copies = accelerator_for(device.type).to_device(chosen, device)
        for index, made in zip(indices, copies):
            result[index] = made
    return result


def accelerator_for(device_type: str) -> Accelerator:
    """What copies between the host and devices of a type: this process's accelerator if it can."""
    if device_type != 'cpu':
        current = current_accelerator()
        if current.device_type == device_type:
            return current
    # Its copies are those that PyTorch has for any device.
    return CPUAccelerator()
