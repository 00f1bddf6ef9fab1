"""Many tensors in few messages."""

from typing import Any, Iterator, List, Sequence

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.device import Accelerator

from .backend import HOST_BACKENDS

MESSAGE_BYTES = 64 << 20


def broadcast_tensors(
    tensors: Sequence[Tensor], accelerator: Accelerator, group: Any = None, src: int = 0
) -> None:
    """Overwrite tensors on every rank with those of one rank.

    The tensors travel as bytes, so dtypes may mix: one message for every 64 MB, through the host
    unless the backend takes the device's tensors alone.

    Args:
        tensors (Sequence[Tensor]): Same number, shapes, dtypes and order on every rank. They may
            lie on the accelerator's device or on the host.
        accelerator (Accelerator): Copies between device and host.
        group (ProcessGroup, optional): Defaults to None: all ranks.
        src (int): The rank whose tensors are taken. Defaults to 0.
    """
    backend = torch_dist.get_backend(group)
    takes_host_tensors = any(name in backend for name in HOST_BACKENDS)
    for part in _parts([tensor.detach() for tensor in tensors]):
        _broadcast(part, accelerator, takes_host_tensors, group, src)


def _parts(tensors: Sequence[Tensor]) -> Iterator[List[Tensor]]:
    part: List[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        bytes_ = tensor.numel() * tensor.element_size()
        if part and size + bytes_ > MESSAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += bytes_
    if part:
        yield part


def _broadcast(
    tensors: List[Tensor],
    accelerator: Accelerator,
    on_host: bool,
    group: Any,
    src: int,
) -> None:
    here = torch_dist.get_rank() == src
    device = torch.device('cpu') if on_host else tensors[0].device
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if here:
        values = accelerator.to_host(tensors) if on_host else tensors
        message = torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in values])
    else:
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    torch_dist.broadcast(message, src, group=group)
    if here:
        return
    received = [
        _reinterpret(bytes_, tensor) for bytes_, tensor in zip(message.split(sizes), tensors)
    ]
    accelerator.copy_to_device(received, tensors)


def _reinterpret(data: Tensor, like: Tensor) -> Tensor:
    """Read bytes as a tensor of another's shape and dtype."""
    # A copy, because the piece of the message may start at an address that dtype cannot take.
    return data.clone().view(like.dtype).view(like.shape)
