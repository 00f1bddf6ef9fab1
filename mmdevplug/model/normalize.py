"""Normalize batches with given statistics, in operations that any device has."""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from mmdevplug.errors import ModelError

from .batch_statistics import (
    CombinedStatistics,
    StatisticsExchange,
    all_but_channels,
    per_channel,
)

Gradients = Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]


def normalize_together(
    operands: Sequence[Tuple[Tensor, Optional[Tensor], Optional[Tensor]]],
    statistics: List[CombinedStatistics],
    exchange: StatisticsExchange,
) -> Tuple[Tensor, ...]:
    """Normalize the inputs of layers that do not depend on each other.

    ``operands`` are input, weight and bias of each layer. Their gradients need one exchange.
    """
    flat = [operand for layer in operands for operand in layer]
    return _Normalize.apply(statistics, exchange, *flat)


def normalize_frozen(layer: _BatchNorm, inputs: Tensor) -> Tensor:
    """Normalize with the running statistics of a layer."""
    invstd = (layer.running_var + layer.eps).rsqrt()
    return _normalize(inputs, layer.weight, layer.bias, layer.running_mean, invstd)


class _Saved(NamedTuple):
    """What the gradients of a layer are computed from."""

    inputs: Tensor
    weight: Optional[Tensor]
    mean: Tensor
    invstd: Tensor


class _Normalize(torch.autograd.Function):
    """Normalize with statistics that depend on the inputs of all ranks.

    The gradient is that of Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network
    Training by Reducing Internal Covariate Shift", 2015, section 3, with the sums taken over all
    ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        statistics: List[CombinedStatistics],
        exchange: StatisticsExchange,
        *operands: Optional[Tensor],
    ) -> Tuple[Tensor, ...]:
        saved: List[Optional[Tensor]] = []
        outputs = []
        for layer, (inputs, weight, bias) in zip(statistics, _by_layer(operands, 3)):
            saved += _Saved(inputs, weight, layer.mean, layer.invstd)
            outputs.append(_normalize(inputs, weight, bias, layer.mean, layer.invstd))
        ctx.save_for_backward(*saved)
        ctx.totals, ctx.exchange = [max(layer.total, 1) for layer in statistics], exchange
        # Of a group, one output may have a gradient and another none.
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Optional[Tensor]) -> Tuple[Any, ...]:
        layers = [_Saved(*saved) for saved in _by_layer(_saved_tensors(ctx), 4)]
        wants = _by_layer(ctx.needs_input_grad[2:], 3)
        grads = [
            None if grad is None else grad.to(layer.mean.dtype)
            for grad, layer in zip(grad_outputs, layers)
        ]
        if len(layers) == 1 and grads[0] is None:
            grads = [torch.zeros_like(layers[0].inputs, dtype=layers[0].mean.dtype)]
        sums = [
            None if grad is None else _sum_products(grad, layer)
            for grad, layer in zip(grads, layers)
        ]
        averages: List[Optional[Tensor]] = [None] * len(layers)
        exchanged = [i for i, (wants_inputs, *_) in enumerate(wants) if wants_inputs]
        if exchanged:
            means = [layers[i].mean for i in exchanged]
            totals = [ctx.totals[i] for i in exchanged]
            found = ctx.exchange.average([sums[i] for i in exchanged], means, totals)
            for i, average in zip(exchanged, found):
                averages[i] = average
        gradients = map(_gradients, layers, wants, grads, sums, averages)
        return (None, None, *(grad for layer in gradients for grad in layer))


def _saved_tensors(ctx: Any) -> Sequence[Any]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if len(ctx.totals) == 1:
            raise
        raise ModelError(
            f'{len(ctx.totals)} layers of synchronized batch normalization share one exchange in '
            f'backward, and backward ran a second time for another of their outputs ({error}). '
            f'Add up the losses and run backward once, or pass retain_graph=True.'
        ) from error


def _gradients(
    layer: _Saved,
    wants: Sequence[bool],
    grad_outputs: Optional[Tensor],
    sums: Optional[Tensor],
    averages: Optional[Tensor],
) -> Gradients:
    """The gradients of a layer's input, weight and bias."""
    inputs, weight, mean, invstd = layer
    wants_inputs, wants_weight, wants_bias = wants
    if sums is None:
        if averages is None:
            return None, None, None
        # Unused here, but its statistics are part of what other ranks have used.
        grad_outputs = torch.zeros_like(inputs, dtype=mean.dtype)
        sums = torch.zeros_like(averages)
    grad_weight = (sums[1] * invstd).to(weight.dtype) if wants_weight else None
    grad_bias = sums[0] if wants_bias else None
    if not wants_inputs:
        return None, grad_weight, grad_bias
    slope = per_channel(averages[1] * invstd * invstd, inputs)
    grad_inputs = (inputs.to(mean.dtype) - per_channel(mean, inputs)).mul_(slope)
    grad_inputs = (grad_outputs - grad_inputs).sub_(per_channel(averages[0], inputs))
    grad_inputs.mul_(per_channel(_scale(invstd, weight), inputs))
    return grad_inputs.to(inputs.dtype), grad_weight, grad_bias


def _by_layer(values: Sequence[Any], length: int) -> List[Sequence[Any]]:
    return [values[start : start + length] for start in range(0, len(values), length)]


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


def _sum_products(grad_outputs: Tensor, layer: _Saved) -> Tensor:
    """Sums of the gradient and of its products with the centred inputs, of shape (2, C)."""
    inputs = layer.inputs
    centred = inputs.to(layer.mean.dtype) - per_channel(layer.mean, inputs)
    dims = all_but_channels(inputs)
    return torch.stack([grad_outputs.sum(dims), (grad_outputs * centred).sum(dims)])
