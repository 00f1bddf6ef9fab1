"""Replace operators that torch_xla 2.9 computes otherwise than the CPU, for its tensors alone.

Each goes when torch_xla computes as the CPU does: ``tests/xla/test_operators.py`` compares them.
"""

import math
from functools import lru_cache, partial, wraps
from inspect import signature
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.nn import functional

from mmdevplug.utils.patching import patch_symbol

from .xla_averages import HALF, adding_bias, dividing, in_float32, shifted_batch_norm
from .xla_indices import checking_indices, checking_labels

#: The constants of SELU.
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
#: Of PyTorch 2.9 and later.
_VIEWS: Any = getattr(torch._C, '_functionalization', None)
#: Views of all elements in their order.
_IN_ORDER = (
    'view_ViewMeta',
    '_unsafe_view_ViewMeta',
    'unsqueeze_ViewMeta',
    'squeeze_ViewMeta',
    'squeeze_dim_ViewMeta',
    'squeeze_dims_ViewMeta',
    'alias_ViewMeta',
    'detach_ViewMeta',
)


_POOLS = ('avg_pool2d', 'avg_pool3d')
_WITH_BIAS = (
    *('linear', 'conv1d', 'conv2d', 'conv3d'),
    *('conv_transpose1d', 'conv_transpose2d', 'conv_transpose3d'),
)


def patch_operators() -> None:
    """Replace them where PyTorch's functions and methods are called."""
    for name, compute in (
        ('elu', _elu),
        ('selu', _selu),
        ('celu', _celu),
        ('interpolate', _interpolate),
        ('batch_norm', shifted_batch_norm),
    ):
        _replace(functional, name, partial(_for_xla, compute=compute))
    copies = hasattr(_VIEWS, 'get_view_meta_sequence')
    for owner, names, make in (
        (Tensor, ('contiguous', 'reshape_as') if copies else (), _copying),
        ((Tensor, torch), ('reshape', 'flatten') if copies else (), _copying),
        (functional, ('adaptive_avg_pool2d', *_POOLS, 'l1_loss', 'mse_loss'), in_float32),
        (functional, _POOLS, dividing),
        (functional, _WITH_BIAS, adding_bias),
        ((Tensor, torch), ('mean', 'sum', 'var', 'std'), in_float32),
        ((Tensor, torch), ('amax', 'amin'), _over_all),
        ((Tensor, torch), ('cumsum', 'count_nonzero'), _counting),
        ((Tensor, torch), ('clamp', 'clip'), _clamping),
        ((functional, torch), ('pixel_shuffle',), _shuffling),
        (functional, ('cross_entropy', 'nll_loss'), checking_labels),
        (functional, ('embedding',), checking_indices),
        ((torch,), ('norm',), _with_largest),
        ((torch,), ('arange',), _on_host),
    ):
        for each in owner if isinstance(owner, tuple) else (owner,):
            for name in names:
                _replace(each, name, make)
    _replace(torch, 'where', _choosing)
    patch_symbol(Tensor, 'where', _choosing_method(Tensor.where))


def _replace(owner: object, name: str, make: Callable[[Callable], Callable]) -> None:
    before = getattr(owner, name)
    replacement: Any = make(before)
    # TorchScript compiles the original: it takes the source of that, and the names of this module.
    replacement.__original_fn, replacement.__script_if_tracing_wrapper = before, True
    patch_symbol(owner, name, replacement)
    operator = _builtins._find_builtin(before)
    if operator is not None:  # or TorchScript compiles the function that stands there now
        _builtins._register_builtin(getattr(owner, name), operator)


def _for_xla(function: Callable, compute: Callable) -> Callable:
    """Call ``compute(function, input, options)`` for tensors of torch_xla."""
    taken = signature(function)

    @wraps(function)
    def call(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        if not isinstance(input, Tensor) or input.device.type != 'xla':
            return function(input, *args, **kwargs)
        options = dict(taken.bind(input, *args, **kwargs).arguments)
        del options['input']
        return compute(function, input, options)

    return call


# activations: the gradient is 1 + x in place of exp(x) -------------------------------------------


def _elu(_: Callable, x: Tensor, options: dict) -> Tensor:
    alpha = options.get('alpha', 1.0)
    return _negative(x, options, lambda low: alpha * torch.expm1(low))


def _celu(_: Callable, x: Tensor, options: dict) -> Tensor:
    alpha = options.get('alpha', 1.0)
    return _negative(x, options, lambda low: alpha * torch.expm1(low / alpha))


def _selu(_: Callable, x: Tensor, options: dict) -> Tensor:
    inner = _negative(x, options, lambda low: _SELU_ALPHA * torch.expm1(low))
    return inner.mul_(_SELU_SCALE) if options.get('inplace') else inner * _SELU_SCALE


def _negative(x: Tensor, options: dict, compute: Callable[[Tensor], Tensor]) -> Tensor:
    if not options.get('inplace'):
        return torch.where(x > 0, x, compute(x.clamp(max=0)))
    before = x.clone()
    return x.copy_(torch.where(before > 0, before, compute(before.clamp(max=0))) * 1)


# sizes -------------------------------------------------------------------------------------------


def _interpolate(interpolate: Callable, x: Tensor, options: dict) -> Tensor:
    """Obey ``scale_factor``, where torch_xla takes the ratio of the sizes."""
    factor, mode = options.get('scale_factor'), options.get('mode', 'nearest')
    if mode == 'nearest' and x.requires_grad:
        repeated = _repeat(x, options.get('size'), factor)
        if repeated is not None:
            return repeated
    whole = options.get('recompute_scale_factor') or options.get('align_corners')
    if factor is None or whole or mode == 'area' or options.get('antialias'):
        return interpolate(x, **options)
    factors = factor if isinstance(factor, (list, tuple)) else [factor] * (x.dim() - 2)
    if all(math.floor(n * each) == n * each for n, each in zip(x.shape[2:], factors)):
        return interpolate(x, **options)
    kind, x = x.dtype, x.float() if x.dtype in HALF else x
    for axis, each in enumerate(factors, 2):
        taps = _taps(x.shape[axis], float(each), mode, x.dim())
        parts = [
            x.index_select(axis, torch.tensor(places, device=x.device))
            * torch.tensor(weights, dtype=x.dtype, device=x.device).view(
                -1, *[1] * (x.dim() - axis - 1)
            )
            for places, weights in taps
        ]
        x = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    return x.to(kind)


def _repeat(x: Tensor, size: Any, factor: Any) -> Optional[Tensor]:
    """Enlarge pictures by whole numbers; None for other sizes.

    torch_xla computes the gradient of ``upsample_nearest2d`` on the host: an execution for each.
    """
    if x.dim() != 4:
        return None
    given = size if factor is None else factor
    pair = list(given) if isinstance(given, (list, tuple)) else [given] * 2
    if factor is None:
        pair = [new / old for new, old in zip(pair, x.shape[2:])]
    if any(each != int(each) or each < 1 for each in pair):
        return None
    n, c, h, w = x.shape
    high, wide = int(pair[0]), int(pair[1])
    # A product, since torch_xla lets copies of an expanded tensor share memory.
    ones = torch.ones(1, 1, 1, high, 1, wide, dtype=x.dtype, device=x.device)
    return (x.reshape(n, c, h, 1, w, 1) * ones).reshape(n, c, h * high, w * wide)


@lru_cache(maxsize=64)
def _taps(size: int, factor: float, mode: str, dims: int) -> List[Tuple[List[int], List[float]]]:
    """For each element of a side that is resized: from which elements, and with what weight."""
    basis = torch.eye(size).view(1, size, size, *[1] * (dims - 3))
    scale = (factor, *[1.0] * (dims - 3))
    rows = functional.interpolate(basis, scale_factor=scale, mode=mode).view(size, -1).t()
    count = max(1, int((rows != 0).sum(1).max()))
    places = rows.abs().topk(count, dim=1).indices
    weights = rows.gather(1, places)
    return [(places[:, k].tolist(), weights[:, k].tolist()) for k in range(count)]


def _shuffling(shuffle: Callable) -> Callable:
    """Move pixels here: torch_xla takes the factor of an earlier call with the same shape."""

    @wraps(shuffle)
    def shuffled(input: Tensor, upscale_factor: int) -> Tensor:
        if input.device.type != 'xla':
            return shuffle(input, upscale_factor)
        *others, channels, height, width = input.shape
        sides, left = (upscale_factor, upscale_factor), channels // upscale_factor**2
        moved = input.reshape(-1, left, *sides, height, width).permute(0, 1, 4, 2, 5, 3)
        return moved.reshape(*others, left, height * upscale_factor, width * upscale_factor)

    return shuffled


def _on_host(arange: Callable) -> Callable:
    """Count in steps of fractions on the host: torch_xla rounds the number of steps otherwise."""

    @wraps(arange)
    def counted(*args: Any, **kwargs: Any) -> Tensor:
        numbers = [*args, *map(kwargs.get, ('start', 'end', 'step'))]
        device = kwargs.get('device')
        fractions = any(isinstance(each, float) and each % 1 for each in numbers)
        if not fractions or device is None or torch.device(device).type != 'xla':
            return arange(*args, **kwargs)
        return arange(*args, **dict(kwargs, device='cpu')).to(device)

    return counted


# memory ------------------------------------------------------------------------------------------


def _copying(method: Callable) -> Callable:
    """Copy where PyTorch copies: torch_xla shares memory, into which a later write goes."""

    @wraps(method)
    def called(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        result = method(input, *args, **kwargs)
        if input.device.type != 'xla':
            return result
        views = _VIEWS.get_view_meta_sequence(input)
        if _in_order(views):
            return result
        base = input._base
        start = 0 if base is None else len(_VIEWS.get_view_meta_sequence(base))
        if base is not None and _in_order(views[:start]):
            # The same views of memory that has strides.
            memory = torch.empty(base.shape, dtype=base.dtype, device='meta')
            strided = _VIEWS.apply_view_meta_sequence(memory, [*map(_sharing, views[start:])])
            if method.__name__ == 'contiguous':
                shares = strided.is_contiguous()
            else:
                shares = method(strided, *args, **kwargs)._is_view()
            if shares:
                return result
        return method(input.clone(), *args, **kwargs)

    return called


def _in_order(views: List[object]) -> bool:
    return all(type(each).__name__ in _IN_ORDER for each in views)


def _sharing(view: Any) -> Any:
    """A view that is one: those of torch_xla copy on devices that have memory."""
    symbolic, copies, *others = view.as_tuple()
    return type(view)((symbolic, True, *others)) if isinstance(copies, bool) else view


# types and reductions ----------------------------------------------------------------------------


def _choosing(where: Callable) -> Callable:
    """Give both sides the type of the result: torch_xla takes that of the first."""

    @wraps(where)
    def choose(condition: Tensor, *sides: Any, **kwargs: Any) -> Any:
        named = [name for name in ('input', 'self', 'other') if name in kwargs]
        sides = (*sides, *map(kwargs.pop, named))
        if condition.device.type != 'xla' or len(sides) != 2:
            return where(condition, *sides, **kwargs)
        kind = torch.result_type(*sides)
        first, second = (
            each.to(kind) if isinstance(each, Tensor) else _as(each, kind) for each in sides
        )
        return where(condition, first, second, **kwargs)

    return choose


def _choosing_method(where: Callable) -> Callable:
    @wraps(where)
    def choose(input: Tensor, condition: Tensor, other: Any) -> Tensor:
        if input.device.type != 'xla':
            return where(input, condition, other)
        return torch.where(condition, input, other)

    return choose


def _as(number: Any, kind: torch.dtype) -> Any:
    return float(number) if kind.is_floating_point else number


def _clamping(clamp: Callable) -> Callable:
    """Clamp integers by fractions as floats: torch_xla cuts the result to integers."""

    @wraps(clamp)
    def clamped(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        if input.device.type == 'xla' and not input.is_floating_point():
            for bound in (*args, *kwargs.values()):
                if isinstance(bound, (float, Tensor)):
                    input = input.to(torch.result_type(input, bound))
        return clamp(input, *args, **kwargs)

    return clamped


def _over_all(extreme: Callable) -> Callable:
    """Reduce over all dimensions where none is given: torch_xla returns the tensor as it is."""

    @wraps(extreme)
    def reduced(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        if input.device.type == 'xla' and not args and kwargs.get('dim', ()) in ((), []):
            kwargs['dim'] = tuple(range(input.dim()))
        return extreme(input, *args, **kwargs)

    return reduced


def _counting(count: Callable) -> Callable:
    """Count integers and masks as PyTorch does, in 64 bits: torch_xla keeps their type."""

    @wraps(count)
    def counted(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.device.type != 'xla':
            return count(input, *args, **kwargs)
        if count.__name__ == 'count_nonzero':
            return (input != 0).long().sum(*args, **kwargs)
        if kwargs.get('dtype') is None and not input.is_floating_point():
            input = input.long()
        return count(input, *args, **kwargs)

    return counted


def _with_largest(norm: Callable) -> Callable:
    """Find the largest and smallest absolute value here: torch_xla returns 1."""

    @wraps(norm)
    def normed(
        input: Tensor,
        p: object = 'fro',
        dim: Any = None,
        keepdim: bool = False,
        out: object = None,
        dtype: Any = None,
    ) -> Tensor:
        if input.device.type != 'xla' or p not in (math.inf, -math.inf) or out is not None:
            return norm(input, p, dim, keepdim, out, dtype)
        sizes = input.abs() if dtype is None else input.to(dtype).abs()
        extreme = sizes.amax if p > 0 else sizes.amin
        return extreme(dim=tuple(range(input.dim())) if dim is None else dim, keepdim=keepdim)

    return normed
