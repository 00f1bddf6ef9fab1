"""Walking nested samples: containers of tensors, moved to a device in one call."""

import copy
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import torch
from torch import Tensor

from .base import Accelerator
from .containers import DATACLASS, LEAVES, container_of
from .cpu import CPUAccelerator
from .detection import current_accelerator


def replace_parts(
    nested: Any,
    function: Callable[[Tensor], Tensor],
    other: Optional[Callable[[Any], Any]] = None,
) -> Any:
    """Apply functions to the leaves of nested containers.

    Subclasses of ``dict`` keep what else they hold, and so do OpenMMLab's boxes.

    Args:
        nested: Containers, see :func:`container_of`, and anything else.
        function (callable): Applied to each tensor.
        other (callable, optional): Applied to every other leaf. Defaults to None: they stay.

    Returns:
        Any: The same structure; the very same object where nothing in it has changed.
    """
    if isinstance(nested, Tensor):
        return function(nested)
    if type(nested) in LEAVES:
        return nested if other is None else other(nested)
    container = container_of(type(nested))
    if container is None:
        return _replace_in_object(nested, function, other)
    parts = container.parts(nested)
    new = [replace_parts(part, function, other) for part in parts]
    if all(one is another for one, another in zip(parts, new)):
        return nested
    if container is DATACLASS:
        # It may hold more than its fields.
        made = copy.copy(nested)
        for name, part in zip(container.names(nested), new):
            object.__setattr__(made, name, part)
        return made
    return container.build(type(nested), container.names(nested), new)


def _replace_in_object(
    value: Any, function: Callable[[Tensor], Tensor], other: Optional[Callable[[Any], Any]]
) -> Any:
    if isinstance(value, dict):
        new = {key: replace_parts(part, function, other) for key, part in value.items()}
        if all(part is new[key] for key, part in value.items()):
            return value
        made = copy.copy(value)  # a state_dict with its metadata, a ConfigDict
        for key, part in new.items():
            made[key] = part  # outputs of transformers' models have no update()
        return made
    if isinstance(value, list):
        items = [replace_parts(part, function, other) for part in value]
        if all(one is another for one, another in zip(value, items)):
            return value
        made = copy.copy(value)
        made[:] = items
        return made
    if isinstance(getattr(value, 'tensor', None), Tensor):  # boxes of mmdet and mmrotate
        tensor = function(value.tensor)
        if tensor is value.tensor:
            return value
        made = copy.copy(value)
        made.tensor = tensor
        return made
    return value if other is None else other(value)


def tensors_in(nested: Any) -> List[Tensor]:
    """The tensors in nested containers, in order.

    Args:
        nested: See :func:`replace_parts`.
    """
    found: List[Tensor] = []
    _collect(nested, found)
    return found


def _collect(nested: Any, found: List[Tensor]) -> None:
    kind = type(nested)
    if kind is Tensor or isinstance(nested, Tensor):
        found.append(nested)
    elif kind in LEAVES:
        return
    elif isinstance(nested, dict):
        for part in nested.values():
            _collect(part, found)
    elif isinstance(nested, (list, tuple)):
        for part in nested:
            _collect(part, found)
    else:
        container = container_of(kind)
        if container is not None:
            _collect(container.parts(nested), found)
        elif isinstance(getattr(nested, 'tensor', None), Tensor):  # see _replace_in_object
            found.append(nested.tensor)


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
