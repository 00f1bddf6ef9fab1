"""Copy nested states to the host in one call for each device."""

import copy
from collections import deque
from typing import Dict, List, Tuple, TypeVar

import torch
from torch import Tensor

from mmdevplug.accelerators import Accelerator

State = TypeVar('State')
_CONTAINERS = (list, tuple, set, frozenset, deque)


def copy_to_host(state: State, accelerator: Accelerator, keep: bool = False) -> State:
    """Copy the tensors in dicts, lists, tuples, sets and deques to the host, at any depth.

    Containers keep their types. Tensors and containers that occur more than once stay shared, as
    do storages. With ``keep`` the copy does not change with the original: all else is copied, too.
    """
    leaves = find_leaves(state, {}, set())
    # `deepcopy` takes from here what it would copy otherwise.
    memo: Dict[int, object] = {} if keep else dict(leaves)
    by_device: Dict[torch.device, List[Tensor]] = {}
    for leaf in leaves.values():
        if isinstance(leaf, Tensor):
            by_device.setdefault(leaf.device, []).append(leaf)
    for device, tensors in by_device.items():
        if device.type != 'cpu':
            detached = [tensor.detach() for tensor in tensors]
            memo.update(zip(map(id, tensors), accelerator.copies.to_host(detached)))
        elif keep:
            for tensor in tensors:
                if not tensor.is_leaf:  # which `deepcopy` refuses
                    memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
    return copy.deepcopy(state, memo)


def find_leaves(state: object, leaves: Dict[int, object], seen: set) -> Dict[int, object]:
    """Collect by ``id`` what is in dicts, lists, tuples, sets and deques and is none of these."""
    if isinstance(state, dict):
        # A ConfigDict makes new objects for who asks it by its own method.
        values: Tuple[object, ...] = tuple(dict.values(state))
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
