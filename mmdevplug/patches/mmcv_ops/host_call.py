"""Run one operator on the host, with one copy of all its tensors in each direction."""

from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import torch
from torch import Tensor

from mmdevplug.accelerators import to_device
from mmdevplug.accelerators.move_nested import accelerator_for
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .outputs import has_changed, output_ids

#: mmcv has few CPU kernels for these; they are computed in float32.
REDUCED = (torch.float16, torch.bfloat16)


class HostCall(NamedTuple):
    """The result of an operator, on the device, and the bytes copied to the host and back."""

    result: Any
    fetched: int
    sent: int


@torch.no_grad()
def call_on_host(
    function: Callable, args: Sequence[Any], kwargs: Dict[str, Any], device: torch.device
) -> HostCall:
    """Call an operator with host copies of its tensors on a device.

    Tensors that the operator writes to are updated on the device; those that it only writes to
    are not fetched. Tensors that are on the host already are passed as they are.
    """
    accelerator = accelerator_for(device.type)
    tensors = [*args, *kwargs.values()]
    there = {id(t): t for t in tensors if isinstance(t, Tensor) and t.device == device}
    outputs = output_ids(function, args, kwargs)
    read = [tensor for key, tensor in there.items() if key not in (outputs or ())]
    # Everything, not only what these tensors need: the rest would be computed again later.
    accelerator.materialize(device, read)
    fetched = accelerator.to_host(read)
    host = {id(tensor): _widened(copy) for tensor, copy in zip(read, fetched)}
    for key in set(there) - set(host):
        host[key] = _widened(torch.zeros(there[key].shape, dtype=there[key].dtype))
    before = {key: tensor.clone() for key, tensor in host.items()} if outputs is None else {}

    def on_host(value: Any) -> Any:
        return host.get(id(value), value)

    result = function(
        *[on_host(value) for value in args],
        **{name: on_host(value) for name, value in kwargs.items()},
    )
    if outputs is None:
        written = [key for key in host if has_changed(before[key], host[key])]
    else:
        written = [key for key in outputs if key in there]
    accelerator.copy_to_device([host[key] for key in written], [there[key] for key in written])
    returned = _narrowed(result, list(there.values()))
    sent = [there[key] for key in written] + tensors_in(returned)
    return HostCall(to_device(returned, device), _bytes(fetched), _bytes(sent))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in REDUCED else tensor


def _narrowed(result: Any, tensors: List[Tensor]) -> Any:
    """Convert the result of an operator to the precision of its arguments."""
    reduced = [tensor.dtype for tensor in tensors if tensor.dtype in REDUCED]
    if not reduced:
        return result
    return replace_parts(result, lambda t: t.to(reduced[0]) if t.is_floating_point() else t)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
