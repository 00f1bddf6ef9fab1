"""Broadcast many tensors in few messages."""

from typing import List, Sequence

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators import Accelerator, CPUAccelerator
from mmdevplug.accelerators.backend import group_device
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.torch_compat import get_global_rank, view_as_dtype

from .byte_exchange import group_by_bytes

MESSAGE_BYTES = 64 << 20


def broadcast_tensors(
    tensors: Sequence[Tensor], accelerator: Accelerator, group: AnyGroup = None
) -> None:
    """Overwrite tensors on every rank with those of rank 0 of a group.

    Tensors are sent as bytes, so dtypes may mix: one message for every 64 MB, through the host
    unless the backend takes no tensors of the host. Number, shapes, dtypes and order are the same
    on every rank; tensors may be on the accelerator's device or on the host.
    """
    place, main = group_device(group), get_global_rank(group, 0)
    on_host: List[Tensor] = []
    elsewhere: List[Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            (on_host if tensor.device.type == 'cpu' else elsewhere).append(tensor.detach())
    for part in group_by_bytes([*on_host, *elsewhere], MESSAGE_BYTES):
        there = part[0].device.type != 'cpu'
        if torch_dist.get_rank(group) == 0:
            held = accelerator.copies.to_host(part) if there and place.type == 'cpu' else part
            flat = [view_as_dtype(each.contiguous().view(-1), torch.uint8) for each in held]
            torch_dist.broadcast(torch.cat(flat).to(place), main, group=group)
            continue
        sizes = [tensor.numel() * tensor.element_size() for tensor in part]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=place)
        torch_dist.broadcast(message, main, group=group)
        # Copies, because a piece of the message may start at an address that its dtype refuses.
        received = [
            view_as_dtype(piece.clone(), tensor.dtype).view(tensor.shape)
            for piece, tensor in zip(message.split(sizes), part)
        ]
        (accelerator if there else CPUAccelerator()).copies.into_device(received, part)
