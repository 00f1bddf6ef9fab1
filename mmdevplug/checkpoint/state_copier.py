"""Copy nested states to the host in one call, into memory that is used again."""

import copy
import mmap
from collections import deque
from itertools import accumulate
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

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
        self._accelerator, self._keep = accelerator, keep
        self._sizes: List[Tuple[int, torch.dtype]] = []
        self._memory: List[Any] = []

    def __call__(self, state: object) -> Any:
        """Copy dicts, lists, tuples, sets, deques and tensors, nested, and any other objects."""
        leaves = find_leaves(state, {}, set())
        # `deepcopy` takes from here what it would copy otherwise.
        memo: Dict[Any, Any] = {} if self._keep else dict(leaves)
        by_device: Dict[torch.device, List[Tensor]] = {}
        for leaf in leaves.values():
            if isinstance(leaf, Tensor):
                by_device.setdefault(leaf.device, []).append(leaf)
        for device, tensors in by_device.items():
            if device.type != 'cpu':
                detached = [tensor.detach() for tensor in tensors]
                memo.update(zip(map(id, tensors), self._accelerator.copies.to_host(detached)))
            elif self._keep:
                memo['torch'] = self._kept(tensors)
                for tensor in tensors:
                    if not tensor.is_leaf:  # which `deepcopy` refuses
                        memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
        return copy.deepcopy(state, memo)

    def _kept(self, tensors: Sequence[Tensor]) -> Dict[int, Any]:
        """Copy the storages of host tensors; where PyTorch's ``deepcopy`` looks for them."""
        plain: Dict[int, Tuple[Any, Tensor]] = {}
        for tensor in tensors:
            if type(tensor) is Tensor and tensor.layout == torch.strided and tensor.numel():
                storage = _storage_of(tensor)
                if not (tensor.is_quantized or _bytes_of(storage) % tensor.element_size()):
                    plain.setdefault(storage._cdata, (storage, tensor))
        sizes = [(_bytes_of(storage), tensor.dtype) for storage, tensor in plain.values()]
        if sizes != self._sizes:
            self._sizes, self._memory = sizes, _allocate(sizes)
        for kept, (storage, _) in zip(self._memory, plain.values()):
            kept.copy_(storage)
        return dict(zip(plain, self._memory))


def _storage_of(tensor: Tensor) -> Any:
    if hasattr(tensor, 'untyped_storage'):  # PyTorch 2
        return tensor.untyped_storage()
    return getattr(tensor.storage(), '_storage', tensor.storage())


def _bytes_of(storage: Any) -> int:
    return len(storage) * storage.element_size()


def _allocate(sizes: Sequence[Tuple[int, torch.dtype]]) -> List[Any]:
    """Allocate storages apart from malloc's heap.

    In the heap they would fill the gaps that gradients leave after each iteration; these would
    then be at its end, and glibc returns a free end to the system and asks for it again each time.
    """
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size, _ in sizes]
    pool = mmap.mmap(-1, max(1, sum(room)))
    made = []
    for (size, dtype), offset in zip(sizes, [0, *accumulate(room)]):
        count = size // torch.empty(0, dtype=dtype).element_size()
        memory = torch.frombuffer(pool, dtype=dtype, count=count, offset=offset)
        made.append(_storage_of(memory))
    return made


def find_leaves(state: object, leaves: Dict[int, Any], seen: set) -> Dict[int, Any]:
    """Collect by ``id`` what is in dicts, lists, tuples, sets and deques and is none of these."""
    if isinstance(state, dict):
        # A ConfigDict makes new objects for who asks it by its own method.
        values: Tuple[Any, ...] = tuple(dict.values(state))
    elif isinstance(state, _CONTAINERS):
        values = tuple(state)
    else:
        leaves[id(state)] = state
        return leaves
    if id(state) not in seen:
        seen.add(id(state))
        for value in values:
            find_leaves(value, leaves, seen)
    return leaves
