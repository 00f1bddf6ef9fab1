"""Send collectives that models call through the host where the backend refuses their tensors.

mmdet's heads, for example, average the number of positive samples with
``torch.distributed.all_reduce``.
"""

import inspect
from functools import wraps
from typing import Any, Callable, List, Optional

import torch
from torch import Tensor, distributed as torch_dist

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.backend import backend_of, takes_host_tensors
from mmdevplug.utils.patched_symbols import PROCESS_GROUP
from mmdevplug.utils.patching import patch_symbol, restore_patches
from mmdevplug.utils.pytree import replace_parts, tensors_in

#: The argument that each function writes to.
_WRITTEN = dict(
    all_reduce='tensor',
    broadcast='tensor',
    reduce='tensor',
    all_gather='tensor_list',
    all_gather_into_tensor='output_tensor',
    gather='gather_list',
    scatter='tensor',
    reduce_scatter='output',
    reduce_scatter_tensor='output',
    all_to_all='output_tensor_list',
    all_to_all_single='output',
    recv='tensor',
    send='',
)


def patch_collectives(accelerator: Accelerator) -> None:
    """Let ``torch.distributed`` take tensors of an accelerator whose backend refuses them.

    Tensors that a group takes are passed to PyTorch as before. A second call patches for another
    accelerator.
    """
    restore_collectives()
    if not torch_dist.is_available() or not torch_dist.is_initialized():
        return
    if not _knows_accelerator():
        patch_symbol(torch_dist, 'barrier', _barrier_without_device(torch_dist.barrier))
    if accelerator.takes_tensors(backend_of()):
        return
    for name, written in _WRITTEN.items():
        original = getattr(torch_dist, name, None)  # some came with PyTorch 2.0
        if original is not None:
            patch_symbol(torch_dist, name, _through_host(original, written, accelerator))


def restore_collectives() -> None:
    """Restore what :func:`patch_collectives` replaced."""
    restore_patches(PROCESS_GROUP)


def _knows_accelerator() -> bool:
    try:
        getattr(torch._C, '_get_accelerator', lambda: None)()  # not in PyTorch before 2.3
    except RuntimeError:  # the vendor registered no PrivateUse1HooksInterface
        return False
    return True


def _barrier_without_device(original: Callable) -> Callable:
    """Synchronize with one host element, where PyTorch's barrier fails to find a device."""

    @wraps(original)
    def barrier(group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> Any:
        if not takes_host_tensors(group):
            return original(group, async_op, *args, **kwargs)
        return torch_dist.all_reduce(torch.zeros(1), group=group, async_op=async_op)

    return barrier


def _through_host(original: Callable, written: str, accelerator: Accelerator) -> Callable:
    signature = inspect.signature(original)

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        found = [
            tensor
            for tensor in tensors_in([list(args), kwargs])
            if tensor.device.type == accelerator.device_type
        ]
        if not found:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        group = given.get('group')
        # PyTorch ignores the call of a rank that is not in the group.
        outside = group == torch_dist.GroupMember.NON_GROUP_MEMBER
        if outside or accelerator.takes_tensors(backend_of(group)):
            return original(*args, **kwargs)
        detached = [tensor.detach() for tensor in found]
        copies = dict(zip(map(id, found), accelerator.to_host(detached)))
        on_host = {
            name: replace_parts(value, lambda tensor: copies.get(id(tensor), tensor))
            for name, value in given.items()
        }
        targets = [tensor for tensor in tensors_in(given.get(written)) if id(tensor) in copies]
        sources = [copies[id(tensor)] for tensor in targets]
        work = original(**on_host)
        if work is None or not hasattr(work, 'wait'):
            _copy_back(accelerator, sources, targets)
            return work
        return _Work(work, lambda: _copy_back(accelerator, sources, targets))

    return collective


def _copy_back(accelerator: Accelerator, sources: List[Tensor], targets: List[Tensor]) -> None:
    with torch.no_grad():
        accelerator.copy_to_device(sources, targets)


class _Work:
    """An asynchronous collective on host tensors; ``wait()`` sends the results to the device."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Optional[Callable[[], None]] = finish

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`torch.distributed.Work.wait`."""
        done = self._work.wait(*args, **kwargs)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
