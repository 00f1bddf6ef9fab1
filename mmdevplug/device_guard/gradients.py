"""Move gradients of custom functions back to the devices of their inputs."""

from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from mmdevplug.utils.patching import OWN, Patch, patch_symbol
from mmdevplug.utils.pytree import tensor_bytes

from .stats import MoveStats, Site


class GradientReturns:
    """Moves the gradients that custom functions return to the devices of their operands.

    If a guard moved the operands of a custom function, its backward returns gradients on one
    device, and autograd refuses them. Moves of built-in operations are part of the graph instead.
    Autograd calls ``BackwardCFunction.apply`` for every custom function; it is replaced between
    :meth:`install` and :meth:`remove`.
    """

    def __init__(self, stats: MoveStats) -> None:
        self._stats = stats
        #: One for each thread that has entered the guard.
        self._patches: List[Patch] = []

    def install(self) -> None:
        """Start; calls can be nested."""

        def apply(node: torch.autograd.Function, *args: object) -> object:
            return self.return_gradients(node, patch.original(node, *args))

        patch = patch_symbol(BackwardCFunction, 'apply', apply, OWN)
        self._patches.append(patch)

    def remove(self) -> None:
        """End what was installed last."""
        self._patches.pop().restore()

    def return_gradients(self, node: torch.autograd.Function, gradients: object) -> object:
        """Move the gradients of a node to the devices that the next nodes expect."""
        returned = gradients if isinstance(gradients, tuple) else (gradients,)
        moved = dict(enumerate(returned))
        changed = False
        for i, device in _expected_devices(node):
            gradient = moved.get(i)
            if isinstance(gradient, Tensor) and gradient.device != device:
                moved[i] = gradient.to(device)
                changed = True
                site = Site(type(node).__name__, '', 0, f'gradient {i}')
                self._stats.add(site, 1, tensor_bytes(gradient))
        return tuple(moved.values()) if changed else gradients


def _expected_devices(node: torch.autograd.Function) -> List[Tuple[int, torch.device]]:
    """The device of the gradient of each argument that needs one."""
    needed = [i for i, needs in enumerate(node.needs_input_grad) if needs]
    # Arguments that are not tensors have no edge; those without a gradient have an empty one.
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if len(needed) != len(edges):
        return []
    devices = [(i, _expected_device(*edge)) for i, edge in zip(needed, edges)]
    return [(i, device) for i, device in devices if device is not None]


def _expected_device(node: object, position: int) -> Optional[torch.device]:
    """The device of a node's gradient; None if it is unknown."""
    if hasattr(node, 'variable'):
        return node.variable.device
    metadata = getattr(node, '_input_metadata', None)  # Since torch 2.1.
    return metadata[position].device if metadata else None
