"""Fingerprint tensors by their sums, which show a change that left no other trace."""

from typing import Dict, Iterable, List

import torch
from torch import Tensor

from .base import Accelerator


def tensor_sums(tensors: Iterable[Tensor], accelerator: Accelerator) -> List[str]:
    """Sum each tensor in float32, and copy all sums to the host in one call.

    Args:
        tensors (iterable): On any devices. Those without a sum, as of integers, are passed over.
        accelerator (Accelerator): Makes the copies.

    Returns:
        list: A text for each tensor, by which NaN equals itself; an empty one where there is no
        sum. Tensors of the same bits have the same text on devices of one kind.
    """
    found: List[str] = []
    sums: Dict[int, Tensor] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta:
            sums[len(found)] = tensor.detach().sum(dtype=torch.float32)
        found.append('')
    elsewhere = [place for place, value in sums.items() if value.device.type != 'cpu']
    copies = accelerator.copies.to_host([sums[place] for place in elsewhere])
    sums.update(zip(elsewhere, copies))
    for place, value in sums.items():
        found[place] = str(value.item())
    return found
