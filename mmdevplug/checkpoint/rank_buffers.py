"""Save and restore buffers that differ between ranks, such as unsynchronized statistics."""

import hashlib
from typing import List, Optional

import torch
from mmengine.dist import get_world_size
from torch import Tensor, nn

from mmdevplug.accelerators import Accelerator
from mmdevplug.distributed.byte_exchange import all_gather
from mmdevplug.distributed.json_messages import gather_json
from mmdevplug.distributed.rank_device import group_device
from mmdevplug.utils.torch_compat import view_as_dtype

#: Of one rank; more than that is no statistics, and would make a checkpoint too large.
MOST_BYTES = 64 * 2**20


def gather_buffers(model: nn.Module, accelerator: Accelerator) -> Optional[List[Tensor]]:
    """Gather the bytes of all ranks' buffers; all ranks take part.

    Returns:
        List[Tensor] or None: By rank; None if they are equal, too large or of different sizes.
    """
    if get_world_size() == 1:
        return None
    host = accelerator.to_host(list(model.buffers()))
    parts = [view_as_dtype(value.contiguous().reshape(-1), torch.uint8) for value in host]
    mine = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    digest = hashlib.sha256(mine.numpy().tobytes()).hexdigest()
    found = gather_json([mine.numel(), digest])
    equal = all(each == found[0] for each in found)
    if equal or mine.numel() > MOST_BYTES or any(size != mine.numel() for size, _ in found):
        return None
    return [each.cpu() for each in all_gather(mine.to(group_device()))]


def restore_buffers(model: nn.Module, accelerator: Accelerator, packed: Tensor) -> bool:
    """Restore what :func:`gather_buffers` gathered; False if the model has other sizes."""
    buffers = list(model.buffers())
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    if sum(sizes) != packed.numel():
        return False
    values = [
        # A copy, because a view needs an aligned start.
        view_as_dtype(part.clone(), buffer.dtype).reshape(buffer.shape)
        for part, buffer in zip(packed.split(sizes), buffers)
    ]
    # A moving average counts its steps in a buffer that stays on the host.
    on_host = [(value, b) for value, b in zip(values, buffers) if b.device.type == 'cpu']
    on_device = [(value, b) for value, b in zip(values, buffers) if b.device.type != 'cpu']
    with torch.no_grad():
        for value, buffer in on_host:
            buffer.copy_(value)
        accelerator.copy_to_device([value for value, _ in on_device], [b for _, b in on_device])
    return True
