"""Say which device a rank uses: under a runner of ours, a stock runner, or in a script."""

import os
from dataclasses import replace
from typing import Tuple

import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import (
    Accelerator,
    DeviceContext,
    choose_accelerator,
    current_accelerator,
    device_context,
    set_device_context,
)
from mmdevplug.accelerators.backend import takes_host_tensors
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.environments.launch_variables import LaunchEnv, read_local_rank
from mmdevplug.utils.annotations import AnyGroup


def enter_rank_device(config: AcceleratorConfig = None) -> Tuple[Accelerator, torch.device]:
    """Return the accelerator and the device of this rank, also under a stock runner.

    Args:
        config (str, dict or Accelerator, optional): See
            :func:`mmdevplug.accelerators.choose_accelerator`. Defaults to None: what
            :func:`mmdevplug.init_device` set up, or else what detection finds.
    """
    context = device_context()
    if context is None or config is not None:
        accelerator, reason = choose_accelerator(config)
    elif context.final:
        return context.accelerator, context.device
    else:
        accelerator, reason = context.accelerator, context.reason
    distributed = torch_dist.is_available() and torch_dist.is_initialized()
    # The CPU has room for every rank, so a missing LOCAL_RANK is no error there.
    alone = accelerator.shares_devices or not distributed
    device = accelerator.device(0 if alone else read_local_rank())
    accelerator.set_device(device)
    if context is None or not context.final:
        env = group_env() if distributed else LaunchEnv()
        groups = {} if context is None else context.side_groups
        set_device_context(
            DeviceContext(accelerator, reason, device, env, side_groups=groups, final=False)
        )
    else:
        set_device_context(replace(context, override=accelerator))
    return accelerator, device


def group_env() -> LaunchEnv:
    """The place of this process in a process group that another package started."""
    return LaunchEnv(
        rank=torch_dist.get_rank(), world_size=torch_dist.get_world_size(), local_world_size=None
    )


def group_device(group: AnyGroup = None) -> torch.device:
    """Where a process group takes tensors: on the host if it can, else on this rank's device."""
    if takes_host_tensors(group):
        return torch.device('cpu')
    context = device_context()
    if (context is None or not context.final) and 'LOCAL_RANK' not in os.environ:
        # Whoever started the group without a launcher has set the device, too.
        return current_accelerator().current_device()
    return enter_rank_device()[1]


def rank_devices() -> Tuple[torch.device, ...]:
    """All devices of this rank's model: one, unless the model is spread over several."""
    context = device_context()
    if context is None or not context.final:
        return (enter_rank_device()[1],)
    return context.devices
