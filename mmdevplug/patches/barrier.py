"""Let ranks meet where PyTorch's barrier asks for an accelerator that it does not know."""

from functools import wraps
from typing import Callable

import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators.backend import takes_host_tensors
from mmdevplug.utils.annotations import AnyGroup
from mmdevplug.utils.patching import OWN, active_patches, patch_symbol


def patch_barrier() -> None:
    """Replace ``torch.distributed.barrier`` where it needs a device and finds none."""
    restore_barrier()
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return
    try:
        getattr(torch._C, '_get_accelerator', lambda: None)()  # not in PyTorch before 2.3
    except RuntimeError:  # the vendor registered no PrivateUse1HooksInterface
        barrier = _barrier_without_device(torch_dist.barrier)
        patch_symbol(torch_dist, 'barrier', barrier, OWN)


def restore_barrier() -> None:
    """Restore what :func:`patch_barrier` replaced."""
    for patch in active_patches(torch_dist):
        if patch.name == 'barrier':
            patch.restore()


def _barrier_without_device(original: Callable) -> Callable:
    """Synchronize with one host element, where PyTorch's barrier fails to find a device."""

    @wraps(original)
    def barrier(
        group: AnyGroup = None, async_op: bool = False, *args: object, **kwargs: object
    ) -> object:
        outside = group == torch_dist.GroupMember.NON_GROUP_MEMBER
        if outside or not takes_host_tensors(group):
            return original(group, async_op, *args, **kwargs)
        return torch_dist.all_reduce(torch.zeros(1), group=group, async_op=async_op)

    return barrier
