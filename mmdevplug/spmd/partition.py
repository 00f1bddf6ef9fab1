"""Annotate tensors with how the chips of one program divide them; no value changes by it."""

from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor


class Chips:
    """All chips of this program in a row.

    Attributes:
        count (int): How many there are.
    """

    def __init__(self) -> None:
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        self.count: int = xr.global_runtime_device_count()
        self._mesh = xs.Mesh(np.arange(self.count), (self.count,), ('chips',))

    def split(self, tensor: Tensor, dim: int = 0) -> None:
        """Divide a tensor among the chips along a dimension, whose size they divide."""
        import torch_xla.distributed.spmd as xs

        placed: Any = [None] * tensor.dim()
        placed[dim] = 'chips'
        xs.mark_sharding(tensor, self._mesh, tuple(placed))


def dim_to_split(tensor: Tensor, chips: int) -> Optional[int]:
    """The first dimension whose size the chips divide; None if there is none."""
    return next((i for i, n in enumerate(tensor.shape) if n and n % chips == 0), None)


def is_on_chips(value: object) -> bool:
    """Whether a value is a tensor that can be divided."""
    return isinstance(value, torch.Tensor) and value.device.type == 'xla' and value.dim() > 0
