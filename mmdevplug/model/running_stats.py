"""Update the running statistics of batch normalization where a device's kernel does not.

TorchTPU 0.2 normalizes a batch right and returns the running statistics as they were, so that a
model that trains well predicts with a mean of 0 and a variance of 1.
"""

from typing import Any, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmdevplug.accelerators import Accelerator
from mmdevplug.utils.logs import log_warning


def keep_running_statistics(
    module: nn.Module, accelerator: Accelerator, device: torch.device
) -> None:
    """Have the layers of a model update their running statistics, if the device does not.

    Only devices of vendors' packages are tried.
    """
    if accelerator.package is None:
        return
    layers = [
        part
        for part in module.modules()
        if isinstance(part, _BatchNorm)
        and part.track_running_stats
        # Other forward methods, such as that of our synchronized layer, update them themselves.
        and type(part).forward is _BatchNorm.forward
        and _update not in part._forward_pre_hooks.values()
    ]
    if not layers or _updates(device):
        return
    log_warning(
        f'Batch normalization on {device.type} leaves the running mean and variance as they '
        f'were, a fault of its kernels. They are updated by additional operations for '
        f'{len(layers)} layer(s).'
    )
    for layer in layers:
        layer.register_forward_pre_hook(_update)


def _updates(device: torch.device) -> bool:
    """Whether batch normalization on a device updates the running mean that it is given."""
    mean, variance = torch.zeros(1, device=device), torch.ones(1, device=device)
    inputs = torch.full((2, 1), 4.0, device=device)
    nn.functional.batch_norm(inputs, mean, variance, training=True, momentum=0.5)
    return mean.item() != 0


@torch.no_grad()
def _update(layer: Any, inputs: Tuple[Tensor, ...]) -> None:
    if not layer.training:
        return
    batch = inputs[0].detach().to(layer.running_mean.dtype)
    dims = [dim for dim in range(batch.dim()) if dim != 1]
    # The layer counts the batch afterwards.
    momentum = layer.momentum
    if momentum is None:
        momentum = (layer.num_batches_tracked + 1).to(batch.dtype).reciprocal()
    for running, new in (
        (layer.running_mean, batch.mean(dims)),
        (layer.running_var, batch.var(dims)),
    ):
        running.add_((new - running) * momentum)
