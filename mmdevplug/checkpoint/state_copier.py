"""Copy nested states to the host in one call, into memory that is used again."""

import copy
import mmap
from collections import deque
from itertools import accumulate
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.accelerators import Accelerator

_ALIGNMENT = 64  # bytes, as PyTorch has it
_CONTAINERS = (list, tuple, set, frozenset, deque)


class StateCopier:
    """Copy the tensors of a nested state to the host, in one call for each device.

    Containers keep their types. Tensors and containers that occur more than once stay shared.
    With ``keep`` the copy does not change with the original: host tensors are copied, too, into
    memory that the next call uses again.
    """

    def __init__(self, accelerator: Accelerator, keep: bool = False) -> None:
        self._accelerator = accelerator
        self._keep = keep
        self._memory: List[Tensor] = []

    def __call__(self, state: object) -> Any:
        """Copy dicts, lists, tuples, sets, deques and tensors, nested, and any other objects."""
        leaves: Dict[int, Any] = {}
        _find_leaves(state, leaves, set())
        tensors = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, Tensor)}
        # `deepcopy` takes from here what it would copy otherwise.
        memo: Dict[int, Any] = {} if self._keep else dict(leaves)
        memo.update(zip(tensors, self._copy(list(tensors.values()))))
        return copy.deepcopy(state, memo)

    def _copy(self, tensors: List[Tensor]) -> List[Tensor]:
        by_device: Dict[torch.device, Dict[Any, Tensor]] = {}
        for tensor in tensors:
            # Tensors at the same place are copied once.
            by_device.setdefault(tensor.device, {}).setdefault(_place(tensor), tensor.detach())
        on_host: Dict[Any, Tensor] = {}
        for device, chosen in by_device.items():
            copies = list(chosen.values())
            if device.type != 'cpu':
                copies = self._accelerator.copies.to_host(copies)
            elif self._keep:
                copies = self._kept(copies)
            on_host.update(zip(chosen, copies))
        return [_like_original(on_host[_place(tensor)], tensor) for tensor in tensors]

    def _kept(self, tensors: List[Tensor]) -> List[Tensor]:
        """Copy host tensors; views of one storage become views of one copy."""
        plain = {id(each): _whole_storage(each) for each in tensors if _has_plain_memory(each)}
        # NumPy can give one address to several storages: the largest holds the others.
        largest_last = sorted(plain.values(), key=Tensor.numel)
        wholes = {(whole.data_ptr(), whole.dtype): whole for whole in largest_last}
        sizes = [(whole.shape, whole.dtype) for whole in wholes.values()]
        if [(kept.shape, kept.dtype) for kept in self._memory] != sizes:
            self._memory = _allocate_like(list(wholes.values()))
        memory = dict(zip(wholes, self._memory))
        for key, whole in wholes.items():
            memory[key].copy_(whole)
        copies = []
        for tensor in tensors:
            if id(tensor) not in plain:
                copies.append(copy.deepcopy(tensor))
                continue
            whole = plain[id(tensor)]
            place = (tensor.shape, tensor.stride(), tensor.storage_offset())
            copies.append(memory[whole.data_ptr(), whole.dtype].as_strided(*place))
        return copies


def _has_plain_memory(tensor: Tensor) -> bool:
    """Whether a host tensor is a view of numbers in a storage, as most are."""
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not tensor.is_quantized
        # Not read from its memory with another sign.
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _whole_storage(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor is a view of, in one dimension."""
    storage = tensor.untyped_storage() if hasattr(tensor, 'untyped_storage') else tensor.storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage)


def _allocate_like(tensors: Sequence[Tensor]) -> List[Tensor]:
    """Allocate memory apart from malloc's heap, with one storage for each tensor.

    In the heap it would fill the gaps that gradients leave after each iteration; these would then
    be at its end, and glibc returns a free end to the system and asks for it again each time.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    pool = mmap.mmap(-1, max(1, sum(room)))
    offsets = [0, *accumulate(room)]
    return [
        torch.frombuffer(pool, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        for tensor, offset in zip(tensors, offsets)
    ]


def _place(tensor: Tensor) -> Any:
    """A key that tensors with the same memory, shape and dtype have in common."""
    if tensor.device.type != 'cpu' or not _has_plain_memory(tensor.detach()):
        return id(tensor)  # lazy tensors have no address
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _like_original(copied: Tensor, tensor: Tensor) -> Tensor:
    """Make a host copy a parameter, or let it require gradients, if the original does."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    if tensor.requires_grad and tensor.is_leaf:
        return copied.detach().requires_grad_()
    return copied


def _find_leaves(state: object, leaves: Dict[int, Any], seen: set) -> None:
    """Collect by ``id`` what is in dicts, lists, tuples, sets and deques and is none of these."""
    if isinstance(state, dict):
        # A ConfigDict makes new objects for who asks it by its own method.
        values: Tuple[Any, ...] = tuple(dict.values(state))
    elif isinstance(state, _CONTAINERS):
        values = tuple(state)
    else:
        leaves[id(state)] = state
        return
    if id(state) not in seen:
        seen.add(id(state))
        for value in values:
            _find_leaves(value, leaves, seen)
