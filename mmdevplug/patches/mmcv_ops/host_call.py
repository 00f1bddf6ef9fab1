"""Running one operator on the host: everything over in one copy, and back in another."""

from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import torch
from torch import Tensor

from mmdevplug.accelerators import to_device
from mmdevplug.accelerators.move_nested import accelerator_for
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .outputs import Comparison, output_ids

#: What mmcv has few CPU kernels for; float32 holds all of their values.
REDUCED = (torch.float16, torch.bfloat16)


class HostCall(NamedTuple):
    """What a call returned, and what it moved.

    Attributes:
        result (Any): As of the operator, on the device.
        fetched (int): Bytes that were copied to the host.
        sent (int): Bytes that were copied back.
    """

    result: Any
    fetched: int
    sent: int


@torch.no_grad()
def call_on_host(
    function: Callable, args: Sequence[Any], kwargs: Dict[str, Any], device: torch.device
) -> HostCall:
    """Call an operator with host copies of its tensors on a device.

    A lazy device runs what it has recorded once for all of them. Tensors that are only written to
    are not fetched, and those on the host already are given as they are.

    Args:
        function (callable): Of ``mmcv._ext``, with a CPU kernel.
        args (Sequence): Its arguments.
        kwargs (dict): Those by name.
        device (torch.device): The one that all tensors outside the host are on.

    Returns:
        HostCall: With what the operator returned, on the device. What it writes to is written.
    """
    accelerator = accelerator_for(device.type)
    tensors = [*args, *kwargs.values()]
    there = {id(t): t for t in tensors if isinstance(t, Tensor) and t.device == device}
    outputs = output_ids(function, args, kwargs)
    read = [tensor for key, tensor in there.items() if key not in (outputs or ())]
    # All that is recorded, not just what these need: the rest would be computed again later.
    accelerator.materialize(device, read)
    fetched = accelerator.to_host(read)
    host = {id(tensor): _widened(copy) for tensor, copy in zip(read, fetched)}
    for key in set(there) - set(host):
        host[key] = _widened(torch.zeros(there[key].shape, dtype=there[key].dtype))
    comparison = None if outputs is not None else Comparison(list(host.values()))

    def on_host(value: Any) -> Any:
        return host.get(id(value), value)

    result = function(
        *[on_host(value) for value in args],
        **{name: on_host(value) for name, value in kwargs.items()},
    )
    keys: Sequence[int] = list(host)
    written = (
        [key for key in outputs or () if key in there]
        if comparison is None
        else [keys[position] for position in comparison.changed()]
    )
    accelerator.copy_to_device([host[key] for key in written], [there[key] for key in written])
    returned = _narrowed(result, list(there.values()))
    sent = [there[key] for key in written] + tensors_in(returned)
    return HostCall(to_device(returned, device), _bytes(fetched), _bytes(sent))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in REDUCED else tensor


def _narrowed(result: Any, tensors: List[Tensor]) -> Any:
    """Give what an operator returned the precision of its arguments."""
    reduced = [tensor.dtype for tensor in tensors if tensor.dtype in REDUCED]
    if not reduced:
        return result
    return replace_parts(result, lambda t: t.to(reduced[0]) if t.is_floating_point() else t)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
