"""Check embeddings with sparse gradients, which few devices have kernels for."""

from typing import Any

import torch
from torch import nn

from mmdevplug.accelerators import DeviceContext
from mmdevplug.accelerators.backend import waits_for_backward
from mmdevplug.errors import ModelError


def check_sparse_gradients(model: nn.Module, context: DeviceContext) -> None:
    """Refuse to train layers with ``sparse=True`` where their gradients cannot be handled.

    Either the device has no kernels for them, or they would be averaged through the host.
    """
    if context.device.type == 'cpu':
        return
    found = [
        name
        for name, part in getattr(model, 'module', model).named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        and part.sparse
        and part.weight.requires_grad
    ]
    if not found:
        return
    backend = context.backend
    if backend is not None and waits_for_backward(context.accelerator, backend):
        reason = f'backend {backend!r} cannot average those of a lazy device'
    elif not _has_kernels(context.device):
        reason = f'torch {torch.__version__} has no kernels for them on this device'
    else:
        return
    named = ', '.join(found[:5]) + (f' and {len(found) - 5} more' if len(found) > 5 else '')
    raise ModelError(
        f'sparse=True of {named} asks for sparse gradients on {context.device}, and {reason}. '
        f'Set sparse=False for these layers; their gradients are dense then, so take Adam instead '
        f'of SparseAdam.'
    )


def _has_kernels(device: torch.device) -> bool:
    """Whether a device can compute a sparse gradient and add it to a weight, tried once."""
    weight = torch.zeros(2, 1, device=device, requires_grad=True)
    place = torch.zeros(1, dtype=torch.long, device=device)
    try:
        nn.functional.embedding(place, weight, sparse=True).sum().backward()
        gradient: Any = weight.grad
        weight.detach().add_(gradient, alpha=-0.1)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True
