"""The list of passes that make a bare model ready for its devices.

A runner runs it, and so does a wrapper, also one that a script builds by itself. Each pass looks
at the model, and leaves alone what has been done already.
"""

from dataclasses import dataclass
from typing import Callable, Optional, Sequence, Tuple, Union

import torch
from mmengine.model import revert_sync_batchnorm
from torch import nn

from mmdevplug.accelerators import Accelerator, devices_of
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.utils.annotations import AnyGroup

from .move import move_module
from .norm_layers import convert_norm_layers


@dataclass
class Preparation:
    """What the passes need to know.

    Attributes:
        accelerator (Accelerator): That of the model.
        device (torch.device): Its first device in this rank.
        devices (Sequence[torch.device]): All of them; by default those of its parameters.
        averages (bool): Whether gradients are averaged, and statistics may be synchronized.
        sends (bool): Whether weights of rank 0 are sent to other ranks before the move.
        group (ProcessGroup, optional): To which ranks; None is all of them.
        sync_bn (str, optional): One of :data:`.norm_layers.SYNC_BN`.
        host_losses (bool or str, optional): Which losses a lazy device leaves to the host, see
            :func:`mmdevplug.lazy.losses.compute_losses_on_host`; None if a runner has decided
            that before, or nobody has.
        spread (Callable, optional): Puts the model on several devices.
    """

    accelerator: Accelerator
    device: torch.device
    devices: Sequence[torch.device] = ()
    averages: bool = True
    sends: bool = False
    group: AnyGroup = None
    sync_bn: Optional[str] = None
    host_losses: Union[None, bool, str] = None
    spread: Optional[Callable[[nn.Module], nn.Module]] = None


def prepare(model: nn.Module, job: Preparation, wrapper_follows: bool = False) -> nn.Module:
    """Run the passes, or those that come before a wrapper of ours, which runs all of them."""
    kinds = ALL, (LAZY if job.accelerator.compilation.lazy else EAGER)
    for devices, run in BEFORE_WRAPPING if wrapper_follows else PASSES:
        if devices in kinds:
            model = run(model, job)
    return model


def patch_operators(model: nn.Module, job: Preparation) -> nn.Module:
    """Patch functions that a model calls and that read values in the middle of a graph."""
    from mmdevplug.patches.deformable_attention import patch_deformable_attention
    from mmdevplug.patches.mmseg import patch_accuracy

    patch_accuracy(model)
    patch_deformable_attention(job.accelerator.device_type)
    return model


def leave_parts_to_host(model: nn.Module, job: Preparation) -> nn.Module:
    """Compute on the host what has other shapes in each batch, and warn of wrong gradients."""
    if job.host_losses is not None:
        from . import lazy_model

        if job.spread is None:
            lazy_model.leave_parts_to_host(model, job.host_losses)
        lazy_model.warn_of_checkpointed_dropout(model)
    return model


def convert_norms(model: nn.Module, job: Preparation) -> nn.Module:
    """Let synchronized batch normalization work here, or do without where nothing is averaged."""
    if not job.averages:
        return revert_sync_batchnorm(model)
    return convert_norm_layers(model, job.accelerator, job.device, job.sync_bn)


def give_frozen_gradients(model: nn.Module, job: Preparation) -> nn.Module:
    """Let batch normalization with frozen statistics have gradients."""
    from . import frozen_bn

    frozen_bn.give_frozen_gradients(model)
    return model


def spread(model: nn.Module, job: Preparation) -> nn.Module:
    """Put the model on several devices, if it is to be on several."""
    return model if job.spread is None else job.spread(model)


def patch_device_queries(model: nn.Module, job: Preparation) -> nn.Module:
    """Patch functions that ask for CUDA and, without it, do what is wrong on other devices."""
    if job.device.type != 'cuda':
        from mmdevplug.patches.mmseg import patch_focal_loss

        patch_focal_loss()
    if job.device.type not in ('cpu', 'cuda'):
        from mmdevplug.patches.module_device import patch_module_device

        patch_module_device()
    return model


def keep_statistics(model: nn.Module, job: Preparation) -> nn.Module:
    """Update running statistics where the kernels of a device do not."""
    if job.accelerator.package is not None:  # PyTorch's own devices do it right
        from .running_stats import keep_running_statistics

        keep_running_statistics(model, job.accelerator, job.device)
    return model


def send_weights(model: nn.Module, job: Preparation) -> nn.Module:
    """Send the weights of rank 0, before the move: on the host they need no copies."""
    if job.sends:
        tensors = [*model.parameters(), *model.buffers()]
        broadcast_tensors(tensors, job.accelerator, job.group)
    return model


def move(model: nn.Module, job: Preparation) -> nn.Module:
    """Move what is elsewhere to the device."""
    return move_module(model, job.device)


def materialize_predictions(model: nn.Module, job: Preparation) -> nn.Module:
    """Run each prediction as one graph."""
    from mmdevplug.lazy import predictions

    devices = job.devices or devices_of(model.parameters())
    predictions.materialize_predictions(model, job.accelerator, devices)
    return model


#: The devices that a pass is for.
ALL, EAGER, LAZY = 'all', 'eager', 'lazy'
Pass = Tuple[str, Callable[[nn.Module, Preparation], nn.Module]]

#: What has to be known before a wrapper of ours is built, or be done before a model is spread.
BEFORE_WRAPPING: Tuple[Pass, ...] = (
    (LAZY, patch_operators),
    (LAZY, leave_parts_to_host),
    (ALL, convert_norms),
    (LAZY, give_frozen_gradients),
    (ALL, spread),
)
#: All, in this order.
PASSES: Tuple[Pass, ...] = (
    *BEFORE_WRAPPING,
    (ALL, patch_device_queries),
    (EAGER, keep_statistics),
    (ALL, send_weights),
    (ALL, move),
    (LAZY, materialize_predictions),
)
