"""Give a caller what a module wrote into arguments that were copied to the module's device."""

from contextlib import contextmanager
from typing import Any, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor, nn

#: An argument, its copy, and what the copy was: a version of a tensor, the items of a container.
Pair = Tuple[Any, Any, Any]


@contextmanager
def writing_back(given: Sequence[object], moved: Sequence[object]) -> Iterator[None]:
    """Give ``given`` what is written into ``moved`` within this context.

    On one device, a module fills the lists and dicts and writes to the tensors of its caller. On
    another device it gets copies: of the tensors, and of the containers that hold them.
    """
    pairs: List[Pair] = []
    _pair(list(given), list(moved), pairs)
    yield
    # Tensors first: the caller's containers still hold them.
    for one, other, version in pairs:
        if isinstance(one, Tensor) and (version is None or other._version != version):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not _is_trained(one)):
                one.copy_(other)
    for one, other, before in pairs:
        if not isinstance(one, Tensor):
            _refill(one, other, before)


def _is_trained(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.requires_grad


def _pair(given: Any, moved: Any, pairs: List[Pair]) -> None:
    """Collect the tensors and containers that were copied, outer ones before inner ones."""
    if given is moved or type(given) is not type(moved):
        return
    if isinstance(given, Tensor):
        # Inference tensors count no versions: they are always copied.
        pairs.append((given, moved, None if torch.is_inference(moved) else moved._version))
    elif isinstance(given, (list, tuple)):
        if isinstance(given, list):
            pairs.append((given, moved, list(moved)))
        for one, other in zip(given, moved):
            _pair(one, other, pairs)
    elif isinstance(given, set):
        pairs.append((given, moved, set(moved)))
    elif isinstance(given, dict):
        pairs.append((given, moved, dict(moved)))
        for name in given:
            _pair(given[name], moved.get(name), pairs)
    elif hasattr(given, '__dict__') and not isinstance(given, nn.Module):
        _pair(vars(given), vars(moved), pairs)  # with a method `to`, such as a data sample


def _refill(given: Any, moved: Any, before: Any) -> None:
    """Put new items of a copied container into the caller's; the others stay the caller's."""
    if isinstance(given, set):
        given.difference_update(before - moved)
        given.update(moved - before)
    elif isinstance(given, dict):
        for name in before.keys() - moved.keys():
            given.pop(name, None)
        for name, value in moved.items():
            if name not in before or value is not before[name]:
                given[name] = value
    elif len(moved) != len(before) or any(a is not b for a, b in zip(moved, before)):
        own = {id(copied): value for copied, value in zip(before, given)}
        given[:] = [own.get(id(value), value) for value in moved]
