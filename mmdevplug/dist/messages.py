"""Small values from every rank to every rank, as JSON: nothing that arrives is run."""

import json
from typing import Any, List, Optional

import torch
from torch import distributed as torch_dist

from .backend import HOST_BACKENDS


def gather_json(value: Any, group: Any = None, device: Optional[torch.device] = None) -> List[Any]:
    """Collect a value from all ranks.

    Args:
        value: What ``json`` takes: dicts, lists, strings, numbers, None.
        group (ProcessGroup, optional): Defaults to None: all ranks.
        device (torch.device, optional): Where tensors have to be for a backend that takes none
            of the host. Defaults to None: the host.

    Returns:
        list: The values in the order of ranks; tuples have become lists.
    """
    world_size = torch_dist.get_world_size(group)
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    data = on_backend(text, device, group)
    sizes = _all_gather(torch.tensor([data.numel()], device=data.device), world_size, group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    messages = _all_gather(padded, world_size, group)
    return [
        json.loads(bytes(message[: int(size)].tolist())) for message, size in zip(messages, sizes)
    ]


def on_backend(
    tensor: torch.Tensor, device: Optional[torch.device], group: Any = None
) -> torch.Tensor:
    """Move a host tensor to where the backend takes it.

    Args:
        tensor (Tensor): On the host.
        device (torch.device, optional): The device of this rank; None for the host.
        group (ProcessGroup, optional): Defaults to None: all ranks.
    """
    backend = torch_dist.get_backend(group)
    if device is None or any(name in backend for name in HOST_BACKENDS):
        return tensor
    return tensor.to(device)


def global_rank(group: Any, rank: int) -> int:
    """What a rank of a group is called in the whole job."""
    if group is None or group is torch_dist.group.WORLD:
        return rank
    return torch_dist.get_global_rank(group, rank)


def _all_gather(tensor: torch.Tensor, world_size: int, group: Any) -> List[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(world_size)]
    torch_dist.all_gather(gathered, tensor, group=group)
    return gathered
