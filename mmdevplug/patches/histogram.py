"""Count a histogram of many numbers: in float32 a bin that holds 2 ** 24 grows no more.

mmseg's and mmdet's metrics count the pixels of an image so.
"""

from functools import wraps
from typing import Any, Callable

import torch
from torch import Tensor

from mmdevplug.utils.patching import patch_symbol

#: Float32 holds whole numbers up to this one.
EXACT = 1 << 24


def patch_histograms() -> None:
    """Patch ``torch.histc`` and ``Tensor.histc``."""
    for owner in (torch, Tensor):
        patch_symbol(owner, 'histc', _in_parts(owner.histc))


def _in_parts(histc: Callable) -> Callable:
    @wraps(histc)
    def counted(
        input: Tensor, bins: int = 100, min: Any = 0, max: Any = 0, **options: Any
    ) -> Tensor:
        if options or input.dtype != torch.float32 or input.numel() <= EXACT:
            return histc(input, bins, min, max, **options)
        if min == max:  # the range of the numbers, which is not that of each part
            min, max = input.min().item(), input.max().item()
        parts = [histc(part, bins, min, max) for part in input.flatten().split(EXACT)]
        return torch.stack(parts).long().sum(0).to(input.dtype)

    return counted
