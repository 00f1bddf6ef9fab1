"""Intercept PyTorch's functions before they see their operands."""

from types import FunctionType
from typing import Any, Callable, Iterable, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.errors import DevPlugError

_Mode: object = getattr(torch.overrides, 'TorchFunctionMode', object)
#: torch 1.12 has the class, but cannot enter it.
HAS_MODES = hasattr(_Mode, '__enter__')

_tensor_backward, _backward, _grad = Tensor.backward, torch.autograd.backward, torch.autograd.grad


class OperandMode(_Mode if HAS_MODES else object):  # type: ignore[misc]
    """Calls ``mixed(func, args, kwargs)`` for operations with operands on different devices."""

    def __init__(self, mixed: Callable[[Callable, Tuple, dict], object]) -> None:
        if not HAS_MODES:
            raise DevPlugError(
                f'DeviceGuard needs torch >= 1.13 (torch.overrides.TorchFunctionMode), found '
                f'torch {torch.__version__}. Update torch, or leave the guard out.'
            )
        super().__init__()
        self._mixed = mixed

    def __torch_function__(
        self,
        func: Callable,
        types: Sequence[type],
        args: Tuple = (),
        kwargs: Optional[dict] = None,
    ) -> object:
        # Every operation passes here: no calls and no allocations unless they are needed.
        if func is _tensor_backward or func is _backward or func is _grad:
            return self._run_backward(func, types, args, kwargs or {})
        first = None
        for arg in args:
            kind = _KINDS.get(type(arg)) or _kind_of(arg)
            if kind is TENSOR:
                if first is None:
                    first = arg
                elif arg.device != first.device:
                    return self._mixed(func, args, kwargs or {})
            elif kind is SEQUENCE:
                first = _first_unless_mixed(arg, first)
                if first is MIXED:
                    return self._mixed(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        if _first_unless_mixed(kwargs.values(), first) is MIXED:
            return self._mixed(func, args, kwargs)
        return func(*args, **kwargs)

    def _run_backward(
        self, func: Callable, types: Sequence[type], args: Tuple, kwargs: dict
    ) -> object:
        """Run autograd with a new mode: PyTorch disables this one while it runs.

        Autograd's threads inherit the modes that are active when backward starts.
        """
        if any(kind is not Tensor for kind in types):  # A subclass may override backward.
            return func(*args, **kwargs)
        with type(self)(self._mixed):
            return _not_overridden(func)(*args, **kwargs)


#: In place of a tensor: the tensors are on several devices.
MIXED = object()

TENSOR, SEQUENCE, OTHER = 'tensor', 'sequence', 'other'
#: Looked up first: `isinstance` takes as long as everything else.
_KINDS = {Tensor: TENSOR, nn.Parameter: TENSOR, list: SEQUENCE, tuple: SEQUENCE}
_KINDS.update(
    (kind, OTHER)
    for kind in (int, float, bool, str, type(None), slice, torch.Size, torch.dtype, torch.device)
)


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return TENSOR
    return SEQUENCE if isinstance(value, (list, tuple)) else OTHER


def _first_unless_mixed(values: Iterable[Any], first: Optional[Tensor]) -> Any:
    """``first`` or the first tensor in nested lists; MIXED if there are several devices."""
    for value in values:
        kind = _KINDS.get(type(value)) or _kind_of(value)
        if kind is TENSOR:
            if first is None:
                first = value
            elif value.device != first.device:
                return MIXED
        elif kind is SEQUENCE:
            first = _first_unless_mixed(value, first)
            if first is MIXED:
                return MIXED
    return first


def _not_overridden(func: Callable) -> Callable:
    """A copy of a function of torch.autograd that does not call the modes again."""
    names = dict(func.__globals__)
    names['has_torch_function'] = names['has_torch_function_unary'] = lambda *_: False
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
