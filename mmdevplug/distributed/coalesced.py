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
_HOST = CPUAccelerator()


def broadcast_tensors(
    tensors: Sequence[Tensor], accelerator: Accelerator, group: AnyGroup = None
) -> None:
    """Overwrite tensors on every rank with those of rank 0 of a group.

    Tensors are sent as bytes, so dtypes may mix: one message for every 64 MB, through the host
    unless the backend takes no tensors of the host. Number, shapes, dtypes and order are the same
    on every rank; tensors may be on the accelerator's device or on the host.
    """
    place = group_device(group)
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    tensors.sort(key=lambda tensor: tensor.device.type != 'cpu')
    for part in group_by_bytes(tensors, MESSAGE_BYTES):
        copier = _HOST if part[0].device.type == 'cpu' else accelerator
        _broadcast(part, copier, place, group)


def _broadcast(
    tensors: List[Tensor], accelerator: Accelerator, place: torch.device, group: AnyGroup
) -> None:
    here = torch_dist.get_rank(group) == 0
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if here:
        values = accelerator.copies.to_host(tensors) if place.type == 'cpu' else tensors
        message = torch.cat([view_as_dtype(v.contiguous().view(-1), torch.uint8) for v in values])
        message = message.to(place)
    else:
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=place)
    torch_dist.broadcast(message, get_global_rank(group, 0), group=group)
    if not here:
        # Copies, because a piece of the message may start at an address that its dtype refuses.
        received = [
            view_as_dtype(piece.clone(), tensor.dtype).view(tensor.shape)
            for piece, tensor in zip(message.split(sizes), tensors)
        ]
        accelerator.copies.into_device(received, tensors)
