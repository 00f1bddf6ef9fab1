"""The state of this process: its accelerator and device, and how it was started."""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Optional, Tuple

import torch
from torch import distributed as torch_dist

from mmdevplug.environments.launch_variables import LaunchEnv, read_local_rank

from .base import Accelerator
from .detection import AcceleratorConfig, choose_accelerator, get_accelerator

DEFAULT_TIMEOUT = timedelta(minutes=30)  # as torch.distributed has it for gloo


@dataclass(frozen=True)
class DeviceContext:
    """Where this process computes and how it communicates with the other ranks.

    A runner keeps the context that it was built with; :func:`device_context` returns the newest.
    """

    accelerator: Accelerator  #: The family of devices.
    reason: str  #: Why the accelerator was chosen.
    device: torch.device  #: The device of this rank.
    env: LaunchEnv = LaunchEnv()  #: How this process was started.
    backend: Optional[str] = None  #: Backend of the process group, None for a single process.
    timeout: timedelta = DEFAULT_TIMEOUT  #: Timeout of the process group.
    more_devices: Tuple[torch.device, ...] = ()  #: Others that this rank's model is spread over.
    #: Whether :func:`mmdevplug.init_device` set it up. Under a stock runner the device may still
    #: change, when that runner starts its process group.
    final: bool = True
    #: Dtypes of 64 bits that the device does not keep.
    unsupported_64bit_dtypes: Tuple[str, ...] = ()

    @property
    def devices(self) -> Tuple[torch.device, ...]:
        """All devices of this rank; batches arrive on the first."""
        return (self.device, *self.more_devices)

    def materialize(self) -> None:
        """Run what the devices of this rank have recorded, if they are lazy."""
        self.accelerator.compilation.materialize_all(self.devices)

    def describe(self) -> str:
        """One line for the log."""
        named = 'devices' if self.more_devices else 'device'
        line = (
            f'accelerator {self.accelerator.name!r} ({self.reason}): {named} '
            f'{", ".join(map(str, self.devices))} ({self.accelerator.device_name(self.device)})'
        )
        if self.backend is not None:
            line += f', backend {self.backend!r}'
        if self.unsupported_64bit_dtypes:
            dtypes = ' and '.join(self.unsupported_64bit_dtypes)
            line += f'. {dtypes} values are narrowed to 32 bits there, or refused'
        missing = self.accelerator.missing_functions()
        return f'{line}. {missing}' if missing else line


class _Process:
    """The state of this room in this process."""

    context: Optional[DeviceContext] = None


_PROCESS = _Process()


def device_context() -> Optional[DeviceContext]:
    """The context of this process, None before a device was chosen."""
    return _PROCESS.context


def set_device_context(context: Optional[DeviceContext]) -> None:
    """Replace the context of this process."""
    _PROCESS.context = context


def current_accelerator() -> Accelerator:
    """The accelerator of this process, or else the one that detection finds; chooses no device."""
    context = _PROCESS.context
    return get_accelerator('auto') if context is None else context.accelerator


def rank_context() -> DeviceContext:
    """Where this rank computes; under a stock runner its device is chosen and made current first.

    For code without a runner; a runner has a context of its own, see :func:`context_of`.
    """
    context = _PROCESS.context
    if context is None:
        return _enter(*choose_accelerator())
    if context.final or context.env == group_env():
        return context
    return _enter(context.accelerator, context.reason)  # a process group has started since


def context_of(runner: object) -> DeviceContext:
    """The context that a runner was built with, or of this rank for a stock runner."""
    context = getattr(runner, 'device_context', None)
    return rank_context() if context is None else context


def group_timeout() -> timedelta:
    """The timeout of the process group, or PyTorch's default where others started it."""
    return _PROCESS.context.timeout if _PROCESS.context else DEFAULT_TIMEOUT


def enter_rank_device(config: AcceleratorConfig = None) -> Tuple[Accelerator, torch.device]:
    """Return the accelerator and the device of this rank, also under a stock runner.

    Args:
        config (str, dict or Accelerator, optional): See
            :func:`mmdevplug.accelerators.choose_accelerator`. Defaults to None: what
            :func:`mmdevplug.init_device` set up, or else what detection finds.
    """
    context = rank_context() if config is None else _enter(*choose_accelerator(config))
    return context.accelerator, context.device


def _enter(accelerator: Accelerator, reason: str) -> DeviceContext:
    """Make this rank's device of an accelerator the current one, and that of the context."""
    context = _PROCESS.context
    if context is None or not context.final:
        context = DeviceContext(accelerator, reason, torch.device('cpu'), group_env(), final=False)
    elif accelerator is context.accelerator:
        return context
    # The CPU has room for every rank, so a missing LOCAL_RANK is no error there.
    alone = accelerator.shares_devices or not _in_group()
    device = accelerator.device(0 if alone else read_local_rank())
    accelerator.set_device(device)
    context = replace(
        context, accelerator=accelerator, reason=reason, device=device, more_devices=()
    )
    set_device_context(context)
    return context


def _in_group() -> bool:
    return torch_dist.is_available() and torch_dist.is_initialized()


def group_env() -> LaunchEnv:
    """The place of this process in a process group that another package started, if any."""
    if not _in_group():
        return LaunchEnv()
    return LaunchEnv(
        rank=torch_dist.get_rank(), world_size=torch_dist.get_world_size(), local_world_size=None
    )
