"""Normalize batches with given statistics, in operations that any device has."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .statistics_exchange import (
    CombinedStatistics,
    StatisticsExchange,
    all_but_channels,
    per_channel,
)


def normalize_frozen(layer: Any, inputs: Tensor) -> Tensor:
    """Normalize with the running statistics of a layer."""
    invstd = (layer.running_var + layer.eps).rsqrt()
    return _normalize(inputs, layer.weight, layer.bias, layer.running_mean, invstd)


class SynchronizedNormalize(torch.autograd.Function):
    """Normalize with statistics that depend on the inputs of all ranks.

    The gradient is that of Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network
    Training by Reducing Internal Covariate Shift", 2015, section 3, with the sums taken over all
    ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Optional[Tensor],
        bias: Optional[Tensor],
        statistics: CombinedStatistics,
        exchange: StatisticsExchange,
    ) -> Tensor:
        mean, invstd = statistics.mean, statistics.invstd
        ctx.save_for_backward(inputs, weight, mean, invstd)
        ctx.total, ctx.exchange = max(statistics.total, 1), exchange
        return _normalize(inputs, weight, bias, mean, invstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> Tuple[Optional[Tensor], ...]:
        inputs, weight, mean, invstd = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_outputs = grad_outputs.to(mean.dtype)
        sums = _sum_products(grad_outputs, inputs, mean)
        grad_inputs = None
        if wants_inputs:
            averages = ctx.exchange.average(sums, ctx.total)
            slope = per_channel(averages[1] * invstd * invstd, inputs)
            grad_inputs = (inputs.to(mean.dtype) - per_channel(mean, inputs)).mul_(slope)
            grad_inputs = (grad_outputs - grad_inputs).sub_(per_channel(averages[0], inputs))
            grad_inputs.mul_(per_channel(_scale(invstd, weight), inputs))
            grad_inputs = grad_inputs.to(inputs.dtype)
        grad_weight = (sums[1] * invstd).to(weight.dtype) if wants_weight else None
        return grad_inputs, grad_weight, sums[0] if wants_bias else None, None, None


def _scale(invstd: Tensor, weight: Optional[Tensor]) -> Tensor:
    return invstd if weight is None else invstd * weight.to(invstd.dtype)


def _normalize(
    inputs: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], mean: Tensor, invstd: Tensor
) -> Tensor:
    # Centred first: with a large mean, scaled inputs and shift would cancel out.
    outputs = inputs.to(mean.dtype) - per_channel(mean, inputs)
    outputs.mul_(per_channel(_scale(invstd, weight), inputs))
    if bias is not None:
        outputs.add_(per_channel(bias.to(mean.dtype), inputs))
    return outputs.to(inputs.dtype)


def _sum_products(grad_outputs: Tensor, inputs: Tensor, mean: Tensor) -> Tensor:
    """Sums of the gradient and of its products with the centred inputs, of shape (2, C)."""
    centred = inputs.to(mean.dtype) - per_channel(mean, inputs)
    dims = all_but_channels(inputs)
    return torch.stack([grad_outputs.sum(dims), (grad_outputs * centred).sum(dims)])
