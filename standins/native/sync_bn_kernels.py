"""The operations of PyTorch's SyncBatchNorm for PrivateUse1, as vendors bring them.

PyTorch has them for CUDA alone. They are written with ordinary operations here.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _rest(tensor: Tensor) -> Tuple[int, ...]:
    return (0, *range(2, tensor.dim()))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def batch_norm_stats(input: Tensor, eps: float) -> Tuple[Tensor, Tensor]:
    values = _wide(input)
    mean = values.mean(_rest(input))
    variance = (values - _channels(mean, input)).square().mean(_rest(input))
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    momentum: float,
    eps: float,
    counts: Tensor,
) -> Tuple[Tensor, Tensor]:
    counts = counts.view(-1, 1).to(mean.dtype)
    total = counts.sum()
    together = (mean * counts).sum(0) / total
    variance = ((invstd.pow(-2) - eps + (mean - together).square()) * counts).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(together.to(running_mean.dtype) * momentum)
    if running_var is not None:
        unbiased = variance * total / (total - 1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype) * momentum)
    return together, (variance + eps).rsqrt()


def batch_norm_elemt(
    input: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    found = (_wide(input) - _channels(mean, input)) * _channels(invstd, input)
    if weight is not None:
        found = found * _channels(weight, input) + _channels(bias, input)
    return found.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Optional[Tensor],
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    gradient = _wide(grad_out)
    sum_dy = gradient.sum(_rest(input))
    sum_dy_xmu = (gradient * (_wide(input) - _channels(mean, input))).sum(_rest(input))
    dtype = mean.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Optional[Tensor],
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum()
    slope = _channels(sum_dy_xmu / total * invstd * invstd, input)
    gradient = _wide(grad_out) - _channels(sum_dy / total, input)
    gradient = gradient - (_wide(input) - _channels(mean, input)) * slope
    scale = invstd if weight is None else invstd * weight
    return (gradient * _channels(scale, input)).to(input.dtype)


def register() -> Any:
    """Give PrivateUse1 these operations; they are gone with what is returned."""
    library = torch.library.Library('aten', 'IMPL', 'PrivateUse1')
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(kernel.__name__, kernel)
    return library
