"""Move gradients of custom functions back to the devices of their inputs."""

import threading
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from mmdevplug.utils.patching import Patch, patch_symbol

from .moving import size_of
from .stats import MoveStats, Site


class GradientReturns:
    """Moves what the backward of a custom function returns, where autograd would refuse it.

    If a forward got its operands together by moves, its backward computes on that one device too,
    but autograd wants each gradient on the device of its operand. Moves of built-in operations
    are part of the graph and need no such help.

    ``BackwardCFunction.apply`` is what autograd calls for every custom function; it is replaced
    between :meth:`install` and :meth:`remove`.

    Args:
        stats (MoveStats): Where moves are counted.
    """

    _lock = threading.Lock()
    _installed: List['GradientReturns'] = []
    _patch: Optional[Patch] = None

    def __init__(self, stats: MoveStats) -> None:
        self._stats = stats

    def install(self) -> None:
        """Start, once for each call."""
        with self._lock:
            if not self._installed:
                GradientReturns._patch = patch_symbol(BackwardCFunction, 'apply', _apply)
            self._installed.append(self)

    def remove(self) -> None:
        """End; autograd is as before when the last has ended."""
        with self._lock:
            self._installed.remove(self)
            if not self._installed and self._patch is not None:
                self._patch.restore()

    def return_gradients(self, node: Any, gradients: Any) -> Any:
        """Move what the backward of a node returned to where the next nodes want it."""
        returned = gradients if isinstance(gradients, tuple) else (gradients,)
        moved = dict(enumerate(returned))
        changed = False
        for i, device in _expected_devices(node):
            gradient = moved.get(i)
            if isinstance(gradient, Tensor) and gradient.device != device:
                moved[i] = gradient.to(device)
                changed = True
                site = Site(type(node).__name__, '', 0, f'gradient {i}')
                self._stats.add(site, 1, size_of(gradient))
        return tuple(moved.values()) if changed else gradients


def _apply(node: Any, *args: Any) -> Any:
    assert GradientReturns._patch is not None
    gradients = GradientReturns._patch.original(node, *args)
    for returns in GradientReturns._installed[-1:]:
        gradients = returns.return_gradients(node, gradients)
    return gradients


def _expected_devices(node: Any) -> List[Tuple[int, torch.device]]:
    """For each argument of a custom function that needs a gradient, where it wants it."""
    needed = [i for i, needs in enumerate(node.needs_input_grad) if needs]
    # Arguments that are no tensors have no edge, those that need no gradient an empty one.
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if len(needed) != len(edges):
        return []
    devices = [(i, _expected_device(*edge)) for i, edge in zip(needed, edges)]
    return [(i, device) for i, device in devices if device is not None]


def _expected_device(node: Any, position: int) -> Optional[torch.device]:
    """Where a node wants its gradient; None if nobody can tell."""
    if hasattr(node, 'variable'):
        return node.variable.device
    metadata = getattr(node, '_input_metadata', None)  # Since torch 2.1.
    return metadata[position].device if metadata else None
