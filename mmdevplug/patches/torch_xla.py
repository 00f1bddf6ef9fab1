"""Let tensor methods and functions of torch_xla do what they do on other devices."""

from functools import wraps
from inspect import signature
from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional

from mmdevplug.utils.patching import patch_symbol
from mmdevplug.utils.torch_compat import NAMES_LAZY_TENSORS

#: The constants of SELU.
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def patch_tensor_methods() -> None:
    """Patch ``Tensor.type`` and ``index_select`` for tensors of torch_xla."""
    patch_symbol(Tensor, 'type', _casting(Tensor.type))
    for owner in (Tensor, torch) if NAMES_LAZY_TENSORS else ():  # not on a T20
        patch_symbol(owner, 'index_select', _selecting(owner.index_select))
    if NAMES_LAZY_TENSORS:
        patch_operators()


def patch_operators() -> None:
    """Replace operators that torch_xla 2.9 computes wrongly, for its tensors."""
    for name, negative in (('elu', _elu), ('selu', _selu), ('celu', _celu)):
        patch_symbol(functional, name, _with_right_gradient(getattr(functional, name), negative))
    for owner, names in (
        (Tensor, ('mean',)),
        (torch, ('mean',)),
        (functional, ('adaptive_avg_pool2d', 'avg_pool2d')),
    ):
        for name in names:
            patch_symbol(owner, name, _in_float32(getattr(owner, name)))


def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def _selu(x: Tensor) -> Tensor:
    return _SELU_SCALE * _elu(x, _SELU_ALPHA)


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) / alpha))


def _with_right_gradient(function: Callable, compute: Callable) -> Callable:
    """Compute from operators with right gradients: torch_xla's is 1 + x in place of exp(x)."""

    taken = signature(function)

    @wraps(function)
    def activate(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.device.type != 'xla':
            return function(input, *args, **kwargs)
        options = dict(taken.bind(input, *args, **kwargs).arguments)
        del options['input']
        if not options.pop('inplace', False):
            return compute(input, **options)
        return input.copy_(compute(input.clone(), **options) * 1)

    return activate


def _in_float32(average: Callable) -> Callable:
    """Average bfloat16 in float32: torch_xla keeps the sum in bfloat16, where it stops growing."""

    @wraps(average)
    def averaged(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.device.type != 'xla' or input.dtype != torch.bfloat16:
            return average(input, *args, **kwargs)
        kind = kwargs.get('dtype') or torch.bfloat16
        return average(input.float(), *args, **kwargs).to(kind)

    return averaged


def _casting(type_of: Callable) -> Callable:
    """Name the type of a tensor as PyTorch 2 does, and cast to the types that it names.

    PyTorch 1 has no name for these tensors, and none takes ``'torch.xla.FloatTensor'``.
    """

    @wraps(type_of)
    def cast(tensor: Tensor, dtype: Any = None, *args: object, **kwargs: object) -> Any:
        if dtype is None and tensor.device.type == 'xla':
            of_host = type_of(torch.empty(0, dtype=tensor.dtype))
            return of_host.replace('torch.', 'torch.xla.', 1)
        if not isinstance(dtype, str) or not dtype.startswith('torch.xla.'):
            return type_of(tensor, dtype, *args, **kwargs)
        device = tensor.device if tensor.device.type == 'xla' else torch.device('xla')
        return tensor.to(device, getattr(torch, dtype.rpartition('.')[2]).dtype)

    return cast


def _selecting(select: Callable) -> Callable:
    """Select by copies of indices.

    torch_xla 2.9 aborts the process if they are an output of ``sort`` or ``topk`` as it is, which
    has no shape of its own; those of mmcv's ``nms_rotated`` are.
    """

    @wraps(select)
    def index_select(*args: Any, **kwargs: Any) -> Tensor:
        index = args[2] if len(args) > 2 else kwargs.pop('index')
        if index.device.type == 'xla':
            index = index + 0
        return select(*args[:2], index=index, **kwargs)

    return index_select
