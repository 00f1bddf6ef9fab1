"""Replace averages and batch norm that torch_xla 2.9 computes otherwise than the CPU.

For its tensors alone; each goes when torch_xla computes as the CPU does.
"""

import math
from functools import wraps
from typing import Any, Callable, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional

HALF = (torch.float16, torch.bfloat16)


def in_float32(average: Callable) -> Callable:
    """Average bfloat16 in float32: torch_xla keeps the sum in bfloat16, where it stops growing."""

    @wraps(average)
    def averaged(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        if input.device.type != 'xla' or input.dtype != torch.bfloat16:
            return average(input, *args, **kwargs)
        kind = kwargs.get('dtype') or torch.bfloat16
        return average(input.float(), *args, **kwargs).to(kind)

    return averaged


class _Bias(torch.autograd.Function):
    """Add a bias along a dimension; its gradient is added up in float32."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, dim: int) -> Tensor:
        ctx.dim, ctx.kind = dim, bias.dtype
        sizes = [-1 if each == dim else 1 for each in range(output.dim())]
        return output + bias.to(output.dtype).view(sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, Tensor, None]:
        others = [each for each in range(gradient.dim()) if each != ctx.dim]
        added = gradient.float()
        return gradient, (added.sum(others) if others else added).to(ctx.kind), None


def adding_bias(function: Callable) -> Callable:
    """Add the bias of half-precision layers apart: torch_xla adds its gradient up in bfloat16."""

    @wraps(function)
    def computed(
        input: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        apart = bias is not None and input.device.type == 'xla' and torch.is_grad_enabled()
        half = apart and (weight.dtype in HALF or torch.is_autocast_enabled('xla'))
        if bias is None or not half:
            return function(input, weight, bias, *args, **kwargs)
        output = function(input, weight, None, *args, **kwargs)
        digits = ''.join(filter(str.isdigit, function.__name__))
        return _Bias.apply(output, bias, output.dim() - 1 - int(digits or 0))

    return computed


def dividing(average: Callable) -> Callable:
    """Divide by ``divisor_override`` here: torch_xla takes that of an earlier call, or none."""

    @wraps(average)
    def averaged(
        input: Tensor,
        kernel_size: Union[int, Tuple[int, ...]],
        stride: object = None,
        padding: object = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Optional[int] = None,
    ) -> Tensor:
        options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        if divisor_override is None or input.device.type != 'xla' or not input.is_floating_point():
            return average(input, *options)
        dims = 3 if average.__name__.endswith('3d') else 2
        sides, pads = _each(kernel_size, dims), _each(padding, dims)
        steps = _each(stride or kernel_size, dims)
        # Zeros count for nothing in a sum: with all of them there, every window is whole.
        ends = []
        for length, side, step, pad in zip(input.shape[-dims:], sides, steps, pads):
            windows = (length + 2 * pad - side) // step + 1
            if ceil_mode and windows * step < length + pad:  # one more begins inside
                windows += (length + 2 * pad - side) % step > 0
            ends.append(max(pad, (windows - 1) * step + side - length - pad))
        around = [each for pair in zip(reversed(pads), reversed(ends)) for each in pair]
        whole = functional.pad(input, around)
        return average(whole, tuple(sides), tuple(steps)) * (math.prod(sides) / divisor_override)

    return averaged


def _each(value: Any, dims: int) -> List[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def shifted_batch_norm(batch_norm: Callable, x: Tensor, options: dict) -> Tensor:
    """Take one value of each channel from it first, by which no result changes.

    torch_xla subtracts the square of the mean from the mean of squares: a constant channel has a
    negative variance, and is NaN.
    """
    mean = options.get('running_mean')
    if not options.get('training') or x.dim() < 2 or not x.numel():
        return batch_norm(x, **options)
    kind, x = x.dtype, x.float() if x.dtype in HALF else x
    one = x.detach().flatten(2)[0, :, 0] if x.dim() > 2 else x.detach()[0]
    momentum = options.get('momentum', 0.1)
    variance: Any = options.get('running_var')
    if mean is not None:
        options['running_mean'] = mean - one.to(mean.dtype)
        options['running_var'] = variance.clone()
    vars(functional)['_verify_batch_size'](x.size())
    # Not by `batch_norm`: PyTorch's modes would come here again.
    result = torch.batch_norm(
        x - one.view(1, -1, *[1] * (x.dim() - 2)),
        options.get('weight'),
        options.get('bias'),
        options.get('running_mean'),
        options.get('running_var'),
        True,
        momentum,
        options.get('eps', 1e-5),
        False,
    )
    if mean is not None:
        mean.copy_(options['running_mean'] + one.to(mean.dtype))
        # torch_xla divides by the number of elements, PyTorch by one less.
        elements = x.numel() // x.shape[1]
        added = options['running_var'] - variance * (1 - momentum)
        variance.copy_(options['running_var'] + added / max(1, elements - 1))
    return result.to(kind)
