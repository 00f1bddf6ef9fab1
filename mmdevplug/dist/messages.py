"""Small values from every rank to every rank, as JSON: nothing that arrives is run."""

import json
from typing import Any, List, Optional

import torch

from .byte_exchange import carrier, gather_bytes, to_bytes, to_tensor


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
    data = to_tensor(json.dumps(value).encode())
    parts = gather_bytes(data, group, device, purpose='gather_json').parts
    return [json.loads(to_bytes(part)) for part in parts]


def on_backend(
    tensor: torch.Tensor, device: Optional[torch.device], group: Any = None
) -> torch.Tensor:
    """Move a host tensor to where the backend takes it.

    Args:
        tensor (Tensor): On the host.
        device (torch.device, optional): The device of this rank; None for the host.
        group (ProcessGroup, optional): Defaults to None: all ranks.
    """
    return tensor.to(carrier(device, group))
