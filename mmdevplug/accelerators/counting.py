"""Compare the number of ranks with the devices of this host."""

from mmdevplug.errors import LaunchError
from mmdevplug.utils.host import usable_cores

from .base import Accelerator


def count_devices(word: str, accelerator: Accelerator) -> int:
    """Count the processes that a word stands for on an accelerator."""
    if word == 'cpu' or (word == 'auto' and accelerator.shares_devices):
        return usable_cores()
    if accelerator.shares_devices:
        raise LaunchError(
            f'--nproc={word}, but this job trains on {accelerator.name!r}, which has no devices '
            f'to count. Give the number of processes: --nproc N.'
        )
    return accelerator.max_ranks()


def refuse_missing_devices(accelerator: Accelerator, wanted: int) -> None:
    """Refuse more processes than this host has devices, unless processes share them."""
    most = accelerator.max_ranks()
    if not accelerator.shares_devices and wanted > most:
        raise LaunchError(
            f'--nproc={wanted}, but this host has {accelerator.device_count()} '
            f'{accelerator.name} device(s) ({accelerator.describe_visibility()}). Start at most '
            f'{most} processes, or make more devices visible.'
        )
