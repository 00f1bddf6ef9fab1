"""Copying nested states to the host in one call, into memory that is used again."""

import copy
import mmap
from itertools import accumulate
from typing import Any, Callable, Dict, List, Sequence

import torch
from torch import Tensor

from mmdevplug.device import Accelerator

_ALIGNMENT = 64  # bytes, as PyTorch has it


class HostCopy:
    """Copies the tensors of a nested state to the host.

    Those of a device are fetched in one call for each device. Tensors that occur more than once
    stay shared.

    Args:
        accelerator (Accelerator): Of the devices that tensors are on.
        keep (bool): Whether what is returned must not change with the original: all else is
            copied too, host tensors into memory that the next call uses again. Defaults to
            False.
    """

    def __init__(self, accelerator: Accelerator, keep: bool = False) -> None:
        self._accelerator = accelerator
        self._keep = keep
        self._memory: List[Tensor] = []

    def __call__(self, state: Any) -> Any:
        """Copy.

        Args:
            state: Dicts, lists, tuples and tensors, nested, and whatever else.

        Returns:
            The same structure with host tensors.
        """
        found: Dict[int, Tensor] = {}
        _replace(state, lambda tensor: found.setdefault(id(tensor), tensor))
        copies = self._copy(list(found.values()))
        by_id = dict(zip(found, copies))
        other = copy.deepcopy if self._keep else _as_it_is
        return _replace(state, lambda tensor: by_id[id(tensor)], other)

    def _copy(self, tensors: List[Tensor]) -> List[Tensor]:
        places: Dict[Any, int] = {}
        chosen: List[Tensor] = []
        order: List[int] = []
        for tensor in tensors:
            place = _place(tensor)
            if place not in places:
                places[place] = len(chosen)
                chosen.append(tensor.detach())
            order.append(places[place])
        on_host = self._to_host(chosen)
        return [on_host[index] for index in order]

    def _to_host(self, tensors: List[Tensor]) -> List[Tensor]:
        result: List[Any] = [None] * len(tensors)
        by_device: Dict[torch.device, List[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        for device, indices in by_device.items():
            group = [tensors[index] for index in indices]
            if device.type != 'cpu':
                copies = self._accelerator.to_host(group)
            else:
                copies = self._kept(group) if self._keep else group
            for index, copied in zip(indices, copies):
                result[index] = copied
        return result

    def _kept(self, tensors: List[Tensor]) -> List[Tensor]:
        same = len(tensors) == len(self._memory) and all(
            kept.shape == tensor.shape and kept.dtype == tensor.dtype
            for kept, tensor in zip(self._memory, tensors)
        )
        if not same:
            self._memory = _allocate_like(tensors)
        for kept, tensor in zip(self._memory, tensors):
            kept.copy_(tensor)
        return list(self._memory)


def _allocate_like(tensors: Sequence[Tensor]) -> List[Tensor]:
    """Memory apart from malloc's heap, each tensor with a storage of its own.

    In the heap it would fill the gaps that gradients leave after each iteration; these would then
    be at its end, and glibc returns a free end to the system and asks for it again each time.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    pool = mmap.mmap(-1, max(1, sum(room)))
    offsets = [0, *accumulate(room)]
    return [
        torch.frombuffer(pool, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(
            tensor.shape
        )
        if tensor.numel()
        else torch.empty_like(tensor)
        for tensor, offset in zip(tensors, offsets)
    ]


def _place(tensor: Tensor) -> Any:
    """What two tensors of the same memory have in common."""
    if tensor.device.type != 'cpu' or tensor.numel() == 0:
        return id(tensor)  # lazy tensors have no address
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _as_it_is(value: Any) -> Any:
    return value


def _replace(
    state: Any,
    function: Callable[[Tensor], Tensor],
    other: Callable[[Any], Any] = _as_it_is,
) -> Any:
    """Apply functions to all tensors in dicts, lists and tuples, and to all else there."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        copied = {key: _replace(value, function, other) for key, value in state.items()}
        if type(state) is dict:
            return copied
        like = copy.copy(state)  # a state_dict with its metadata, a ConfigDict
        like.update(copied)
        return like
    if isinstance(state, tuple) and hasattr(state, '_fields'):
        return type(state)(*(_replace(value, function, other) for value in state))
    if type(state) in (list, tuple):
        return type(state)(_replace(value, function, other) for value in state)
    return other(state)
