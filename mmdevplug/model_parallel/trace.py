"""Run a model once on the meta device: order of execution, activations, inputs of modules."""

import functools
from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.errors import PlacementError, first_line
from mmdevplug.utils.patching import LocalPatch
from mmdevplug.utils.pytree import replace_parts, tensors_in

from .walk_modules import named_tensors, prefixes, tensor_bytes


@dataclass
class Trace:
    """What one forward pass showed of each module."""

    #: When it, or a module inside it, ran first.
    calls: Dict[str, int] = field(default_factory=dict)
    #: Bytes of the tensors given to it at its first call.
    traffic: Dict[str, int] = field(default_factory=dict)
    #: Bytes that it keeps itself for the backward pass; empty unless training. What it keeps
    #: between its children counts for the child before.
    activations: Dict[str, int] = field(default_factory=lambda: defaultdict(int))


def trace(
    model: nn.Module,
    sample_inputs: object,
    training: bool = False,
    dtype: Optional[torch.dtype] = None,
) -> Trace:
    """Run a model once without memory, wherever its weights are; the model is not changed.

    ``sample_inputs`` is one batch: a tensor, a tuple or list of arguments, or a dict of keyword
    arguments. The values are not read. Floating weights and inputs are cast to ``dtype``.
    """
    call = getattr(getattr(torch, 'func', None), 'functional_call', None)
    if call is None:
        raise PlacementError(
            f'torch {torch.__version__} cannot run a model without memory (torch 2.0 can); plan '
            f'without sample_inputs.'
        )
    state = _on_meta(model, dtype)
    args, kwargs = _arguments(sample_inputs, dtype)
    watch = _CallRecorder(model, {t.untyped_storage()._cdata for t in state.values()})
    watch.kept += state.values()
    try:
        with ExitStack() as stack:
            stack.callback(watch.remove)
            stack.enter_context(torch.device('meta'))
            stack.enter_context(_autocast_on_meta())
            stack.enter_context(torch.set_grad_enabled(training))
            if training:
                hooks = torch.autograd.graph.saved_tensors_hooks(watch.save, lambda kept: kept)
                stack.enter_context(hooks)
            call(model, state, args, kwargs)
    except Exception as error:
        # Models raise errors of any kind.
        raise PlacementError(
            f'the pass of {type(model).__name__} on the meta device fails with '
            f'{type(error).__name__}: {first_line(error)}. Check sample_inputs; a model that '
            f'reads values of tensors on the way is planned without them.'
        ) from error
    return watch.found


_autocast = LocalPatch(torch, 'autocast')


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Let models turn autocast off for their device, which older releases refuse for meta."""

    def autocast(original: Callable, device_type: str, *args: object, **kwargs: object) -> Any:
        return nullcontext() if device_type == 'meta' else original(device_type, *args, **kwargs)

    with _autocast(autocast):
        yield


def _on_meta(model: nn.Module, dtype: Optional[torch.dtype]) -> Dict[str, Tensor]:
    made: Dict[int, Tensor] = {}
    for _, tensor in named_tensors(model):
        copy = _meta(tensor.detach(), dtype)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        made.setdefault(id(tensor), copy)
    return {name: made[id(tensor)] for name, tensor in named_tensors(model)}


def _meta(tensor: Tensor, dtype: Optional[torch.dtype]) -> Tensor:
    return tensor.to('meta', dtype if dtype is not None and tensor.is_floating_point() else None)


def _arguments(sample_inputs: object, dtype: Optional[torch.dtype]) -> Tuple[tuple, dict]:
    found = replace_parts(sample_inputs, lambda tensor: _meta(tensor, dtype))
    if isinstance(found, dict):
        return (), found
    return (tuple(found) if isinstance(found, (list, tuple)) else (found,)), {}


class _CallRecorder:
    """Hooks on every module of a model."""

    def __init__(self, model: nn.Module, weights: set) -> None:
        self.found = Trace()
        self.kept: List[Any] = []  # so that no identity is used twice
        self._seen = set(weights)
        # Each running module, and the last one that ran inside it.
        self._running: List[List[str]] = []
        self._hooks: List[Any] = []
        for name, module in model.named_modules():
            enter = functools.partial(self._enter, name)
            self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str, _: nn.Module, args: tuple, kwargs: dict) -> None:
        calls = self.found.calls
        for prefix in prefixes(name):
            calls.setdefault(prefix, len(calls))
        given = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        self.found.traffic.setdefault(name, sum(map(tensor_bytes, given.values())))
        self._running.append([name, ''])

    def _leave(self, *_: object) -> None:
        name, inside = self._running.pop()
        if self._running:
            self._running[-1][1] = inside or name

    def save(self, tensor: Tensor) -> Tensor:
        """Count what is kept for the backward pass, once for each storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.kept.append(storage)
            # What a module does between its children belongs to the child before.
            running, inside = self._running[-1]
            self.found.activations[inside or running] += storage.nbytes()
        return tensor
