"""Let layers of synchronized batch normalization share one exchange of statistics.

On a lazy device each exchange runs a graph. A layer's output is therefore not computed until a
function needs it; then the statistics of all layers that were called meanwhile are exchanged
together. Layers that depend on each other never meet, because a layer needs its input.

An output that is not computed is a tensor of one NaN whose class resolves it at its first use by
any function of PyTorch, whatever the function is, except for those in :data:`POSTPONED`.
Resolving makes the same object an ordinary tensor with its value and its gradient, so nobody can
hold another one. Code that does not go through PyTorch's functions is covered twice:
``Function.apply`` and the modules of other packages (see :mod:`.deferral_scopes`) resolve their
arguments, and an output that a function has taken before it was computed raises an error.
"""

import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, Callable, ContextManager, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmdevplug.errors import ModelError
from mmdevplug.utils.patching import Patch, patch_symbol
from mmdevplug.utils.torch_compat import (
    autocast_state,
    may_intercept_saved_tensors,
    saving_tensors_as_they_are,
)

from .batch_statistics import HALF, LocalStatistics, StatisticsExchange, local_statistics
from .normalize import normalize_together

#: Functions of one tensor and numbers, which autocast leaves alone.
_ACTIVATIONS = (
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish),
    *(F.hardswish, F.hardsigmoid, F.hardtanh),
    *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh),
    *(Tensor.relu, Tensor.relu_, Tensor.sigmoid, Tensor.tanh),
)
_IN_PLACE = (torch.relu_, Tensor.relu_)
#: Run in float32 by autocast on some devices.
_RESIZES = (F.interpolate,)

#: Functions whose results are not computed either if their input is not.
POSTPONED = frozenset(_ACTIVATIONS + _RESIZES)


class _Origin(NamedTuple):
    """The layer that an output depends on."""

    layer: Any  # DeviceSyncBatchNorm
    exchange: StatisticsExchange
    dtype: torch.dtype  # of the layer's output


class DeferredOutput(Tensor):
    """An output that is not computed until a function other than those postponed takes it."""

    origin: _Origin

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        """Postpone a function, or compute what its operands stand for and run it."""
        kwargs = kwargs or {}
        if func in POSTPONED and len(args) == 1 and type(args[0]) is cls and 'out' not in kwargs:
            postponed = DEFERRED.postpone(func, args[0], kwargs)
            if postponed is not None:
                return postponed
        DEFERRED.resolve()
        return func(*args, **kwargs)


class DroppedOutput(Tensor):
    """An output that will not be computed, because an error ended its forward pass."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        """Refuse to be used."""
        raise ModelError(
            f'{getattr(func, "__name__", func)}() got an output of synchronized batch '
            f'normalization that was never computed, because an error ended the forward pass '
            f'that it belongs to. Look for that error, and do not use tensors of that pass.'
        )


class _Call(NamedTuple):
    """A call of a layer."""

    layer: Any  # DeviceSyncBatchNorm
    inputs: Tensor
    version: int  # of the inputs, as autograd counts changes in place
    exchange: StatisticsExchange
    local: LocalStatistics
    output: Tensor

    @property
    def kind(self) -> Tuple[int, torch.device, torch.dtype]:
        """Equal for calls that can share an exchange."""
        return id(self.exchange.group), self.exchange.device, self.local.values.dtype


class _Step(NamedTuple):
    """A postponed call of a function."""

    func: Callable
    source: Tensor
    kwargs: dict
    output: Optional[Tensor]  # None if the source is changed in place
    context: Callable[[], ContextManager]  # of autocast


class DeferredLayers:
    """The outputs of this process that are not computed."""

    def __init__(self) -> None:
        self._calls: List[_Call] = []
        self._steps: List[_Step] = []
        self._patch: Optional[Patch] = None

    def __bool__(self) -> bool:
        return bool(self._calls)

    def call(self, layer: Any, inputs: Tensor, exchange: StatisticsExchange) -> Tensor:
        """Call a layer; its output is computed later."""
        with torch.no_grad():
            local = local_statistics(inputs, layer.eps)
        output = _deferred_output(_Origin(layer, exchange, inputs.dtype))
        version = inputs._version
        self._calls.append(_Call(layer, inputs, version, exchange, local, output))
        if self._patch is None:
            # It reads the gradient's path of its arguments before they meet a function.
            self._patch = patch_symbol(torch.autograd.Function, 'apply', classmethod(_apply))
        return output

    def postpone(self, func: Callable, source: Tensor, kwargs: dict) -> Optional[Tensor]:
        """Run a function on an output later; None if it has to run at once."""
        if not torch.is_grad_enabled() or may_intercept_saved_tensors():
            return None
        context: Callable[[], ContextManager] = nullcontext
        if func in _RESIZES and source.origin.dtype in HALF:
            accelerator = source.origin.exchange.accelerator
            state = autocast_state(accelerator.device_type)
            if state is None:
                return None
            context = partial(accelerator.autocast, enabled=state[0], dtype=state[1])
        if func in _IN_PLACE or kwargs.get('inplace'):
            self._steps.append(_Step(func, source, kwargs, None, context))
            return source
        output = _deferred_output(source.origin)
        self._steps.append(_Step(func, source, kwargs, output, context))
        return output

    def resolve(self) -> None:
        """Compute all outputs, which become ordinary tensors."""
        if not self._calls:
            return
        calls, steps = self._take()
        # Whatever mode the code is in that needs an output: gradients are recorded, as in forward.
        with torch.inference_mode(False), torch.enable_grad(), saving_tensors_as_they_are():
            for _, alike in groupby(calls, key=lambda call: call.kind):
                _compute(list(alike))
            for step in steps:
                _run(step)

    def drop(self) -> None:
        """Forget the outputs that are not computed."""
        if self._calls:
            self._take()

    def _take(self) -> Tuple[List[_Call], List[_Step]]:
        calls, steps = self._calls, self._steps
        self._calls, self._steps = [], []
        if self._patch is not None:
            self._patch.restore()
            self._patch = None
        for entry in (*calls, *steps):
            if entry.output is not None:
                entry.output.__class__ = DroppedOutput  # until it is computed
        return calls, steps


#: The outputs of this process that are not computed.
DEFERRED = DeferredLayers()


@contextmanager
def resolving() -> Iterator[None]:
    """Compute what a forward pass has deferred at its end, or drop it after an error."""
    try:
        yield
    except BaseException:
        DEFERRED.drop()
        raise
    DEFERRED.resolve()


def resolve_arguments(*values: Any) -> None:
    """Compute all outputs if one of them is among some values or in a list, tuple or dict."""
    if DEFERRED and _has_deferred(values):
        DEFERRED.resolve()


def _has_deferred(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is DeferredOutput
    if isinstance(value, dict):
        return any(map(_has_deferred, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_deferred, value))


#: Before it is patched; None in PyTorch 1.10, where it is inherited from a class written in C++.
_OWN_APPLY: Any = vars(torch.autograd.Function).get('apply')


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    """See :meth:`torch.autograd.Function.apply`."""
    resolve_arguments(args, kwargs)
    if _OWN_APPLY is None:
        return super(torch.autograd.Function, cls).apply(*args, **kwargs)
    return _OWN_APPLY.__get__(None, cls)(*args, **kwargs)


def _compute(calls: List[_Call]) -> None:
    """Normalize the inputs of layers whose statistics are exchanged together."""
    remaining = list(calls)
    for combined in calls[0].exchange.combine([call.local for call in calls]):
        group, remaining = remaining[: len(combined)], remaining[len(combined) :]
        for call, statistics in zip(group, combined):
            call.layer.take_statistics(statistics)
            if call.inputs._version != call.version:
                raise ModelError(
                    f'{type(call.layer).__name__} {call.layer.layer_name!r}: its input was '
                    f'changed in place after the call, and its gradient needs it as it was. '
                    f'Change a copy: x = x + 1 instead of x += 1, inplace=False.'
                )
        operands = [(call.inputs, call.layer.weight, call.layer.bias) for call in group]
        outputs = normalize_together(operands, combined, calls[0].exchange)
        for call, output in zip(group, outputs):
            _fill(call.output, output)


def _run(step: _Step) -> None:
    """Run a postponed function."""
    with step.context():
        result = step.func(step.source, **step.kwargs)
    if step.output is not None:
        _fill(step.output, result)


def _deferred_output(origin: _Origin) -> Tensor:
    anchor = torch.zeros(1, requires_grad=True)
    device, name = origin.exchange.device, origin.layer.layer_name
    output = _Uncomputed.apply(anchor, origin.dtype, device, name)
    output.__class__ = DeferredOutput
    output.origin = origin
    return output


def _fill(output: Tensor, result: Tensor) -> None:
    """Make an output an ordinary tensor, with the value and the gradient of a result."""
    output.__class__ = Tensor
    name = output.origin.layer.layer_name
    del output.origin
    node = weakref.ref(output.grad_fn)
    output.detach_()
    if node() is not None:  # kept alive by a function that took the output
        raise _bypassed(name)
    _Become.apply(output, result)


def _bypassed(name: str) -> ModelError:
    return ModelError(
        f'the output of synchronized batch normalization {name!r} was used before it was '
        f'computed, by code that does not go through the functions of PyTorch (a compiled '
        f'extension or a scripted function). Its result and gradient would be wrong. Pass a copy '
        f'to it, e.g. `x + 0`.'
    )


class _Uncomputed(torch.autograd.Function):
    """A tensor of one NaN that takes no gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, dtype: torch.dtype, device: torch.device, name: str
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.name = name
        return torch.full((1,), float('nan'), dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, grad_output: Optional[Tensor]) -> Tuple[None, ...]:
        if grad_output is not None:
            raise _bypassed(ctx.name)
        return None, None, None, None


class _Become(torch.autograd.Function):
    """Give a tensor the value and the gradient of another one."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, result: Tensor) -> Tensor:
        target.data = result
        ctx.mark_dirty(target)
        return target

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tuple[None, Tensor]:
        return None, grad_output
