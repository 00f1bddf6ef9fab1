"""What a training step computed, and the first place where two steps differ."""

from contextlib import contextmanager
from itertools import chain
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from mmdevplug.utils.pytree import tensors_in

from .operators import SPREAD, TOLERANCE_OF_HALF, Place

#: Smaller than this part of the largest gradient, a gradient is rounding.
NEGLIGIBLE = 1e-4
#: Of weights in 16 bits: a bias in front of batch normalization has a gradient of rounding alone.
NEGLIGIBLE_IN_HALF = 1e-2
#: The same of buffers, such as the mean of a layer whose operands add up to nothing.
NEGLIGIBLE_BUFFER = 1e-3
#: Elements of a tensor that are compared, at equal distances.
SAMPLES = 65536

Key = Tuple[str, int, int]  # name of a module, its call, a tensor of its output


class Record:
    """What one step computed, in the order in which modules returned."""

    def __init__(self) -> None:
        self.outputs: Dict[Key, Tensor] = {}
        self.gradients: Dict[Key, Tensor] = {}  # of these outputs
        self.of_weights: Dict[str, Tensor] = {}
        self.after: Dict[str, Tensor] = {}  # weights and buffers
        self.drew = False  # whether the host drew random numbers
        self.kinds: Dict[str, str] = {}
        self._calls: Dict[str, int] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record outputs of the modules of a model, and the gradients that arrive there."""
        handles = []
        for name, module in model.named_modules():
            self.kinds[name] = type(module).__name__
            handles.append(module.register_forward_hook(self._hook(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_backward(self) -> None:
        """Gradients arrive by themselves."""

    def _hook(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def note(_: nn.Module, __: object, output: object) -> None:
            call = self._calls[name] = self._calls.get(name, 0) + 1
            for number, tensor in enumerate(tensors_in(output)):
                if not tensor.is_floating_point():
                    continue
                key = name, call, number
                self.outputs[key] = sample(tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad, key=key: self._keep(key, grad))

        return note

    def _keep(self, key: Key, grad: Optional[Tensor]) -> None:
        if grad is not None:  # which a function of the user's may return
            self.gradients[key] = sample(grad)

    def finish(self, model: nn.Module, scale: float) -> None:
        """Record gradients and values of weights, and bring everything to the host."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.of_weights[name] = sample(parameter.grad)
        for name, tensor in tensors_of(model):
            if tensor.is_floating_point():
                self.after[name] = sample(tensor)
        for found in (self.outputs, self.gradients, self.of_weights, self.after):
            for key, tensor in found.items():
                found[key] = tensor.cpu().double()  # type: ignore[index]
        for found in (self.gradients, self.of_weights):
            for tensor in found.values():
                tensor.div_(scale)


def sample(tensor: Tensor) -> Tensor:
    """A copy of some elements of a tensor, (N,) with N at most :data:`SAMPLES`."""
    flat = tensor.detach().flatten()
    step = max(1, -(-flat.numel() // SAMPLES))
    return flat[::step].clone().float()


class Difference(NamedTuple):
    """Where a device and the CPU part."""

    key: Any
    there: float
    here: float

    def told(self, device: str) -> str:
        """Both values, as words."""
        return f'{self.there:.5g} on {device} and {self.here:.5g} on the CPU'


class Found(NamedTuple):
    """A difference in words, and where operators are to be compared."""

    text: str
    place: Place


def find_difference(
    there: Record, here: Record, spreads: Sequence[Record], tolerance: float, device: str
) -> Optional[Found]:
    """Find the first difference of a device from the CPU.

    Outputs are compared in the order of the forward pass, gradients against it.
    """
    order = list(here.outputs)
    found = _first(order, 'outputs', there, here, spreads, tolerance)
    if found is not None:
        name, call, number = found.key
        inside = name if name in here.kinds else None
        text = _say('the output of', found, here, order, device)
        return Found(text, Place(inside, call, number))
    keys = [key for key in reversed(order) if key in here.gradients]
    found = _first(keys, 'gradients', there, here, spreads, tolerance)
    if found is not None:
        text = _say('the gradient behind', found, here, order, device)
        name, call, number = found.key
        return Found(text, Place(name, call, number, backward=True))
    found = _first(list(reversed(here.of_weights)), 'of_weights', there, here, spreads, tolerance)
    if found is not None:
        text = f'the gradient of {found.key} is {found.told(device)}'
        return Found(text, Place(None, backward=True, weight=found.key))
    found = _first(list(here.after), 'after', there, here, spreads, tolerance)
    if found is not None:
        text = f'after the step {found.key} is {found.told(device)}'
        return Found(text, Place(found.key.rpartition('.')[0]))
    return None


def _first(
    keys: List[Any],
    kind: str,
    there_of: Record,
    here_of: Record,
    spreads_of: Sequence[Record],
    tolerance: float,
) -> Optional[Difference]:
    there, here = getattr(there_of, kind), getattr(here_of, kind)
    spreads = [getattr(each, kind) for each in spreads_of]
    least = {'outputs': 0.0, 'after': NEGLIGIBLE_BUFFER}.get(kind, NEGLIGIBLE)
    if kind == 'of_weights' and tolerance == TOLERANCE_OF_HALF:
        least = NEGLIGIBLE_IN_HALF
    least *= max((_size(each) for each in here.values()), default=0.0)
    for key in keys:
        one, other, moved = here[key], there.get(key), [each.get(key) for each in spreads]
        if not one.numel() or not all(is_like(each, one) for each in moved):
            continue  # drawn at random
        if other is None or not is_like(other, one):
            if isinstance(key, tuple):
                continue  # a lazy device computes parts on the host, or in fixed sizes
            return Difference(key, float('nan'), float(one[0]))
        if not all(bool(torch.isfinite(each).all()) for each in (one, *moved)):
            continue
        size = max(_size(one), least, 1e-12)
        spread = torch.stack([(each - one).abs() for each in moved]).amax(0)
        spread.clamp_(min=float(spread.square().mean().sqrt()))
        apart = (other - one).abs()
        apart[~torch.isfinite(other)] = float('inf')
        excess = apart - (SPREAD * spread).clamp(min=tolerance * size)
        place = int(excess.argmax())
        if excess[place] > 0:
            return Difference(key, float(other[place]), float(one[place]))
    return None


def is_like(tensor: Optional[Tensor], other: Tensor) -> bool:
    """Whether there is a tensor, of the shape of another."""
    return tensor is not None and tensor.shape == other.shape


def _size(tensor: Tensor) -> float:
    return float(tensor[torch.isfinite(tensor)].abs().max()) if tensor.numel() else 0.0


def _say(what: str, found: Difference, here: Record, order: List[Key], device: str) -> str:
    name, call, _ = found.key
    kind = here.kinds.get(name)
    place = name if kind is None else f'{name or "the model"} ({kind})'
    text = f'{what} {place} is {found.told(device)}' + (f' in call {call}' if call > 1 else '')
    if what == 'the gradient behind':
        after = next((key[0] for key in order[order.index(found.key) + 1 :]), None)
        text = f'{text}; the operators between it and {after or "the loss"} differ'
    elif any(key[0].startswith(f'{name}.' if name else '') for key in order if key[0] != name):
        text = f'{text}; its parts are right, so that its own forward() differs'
    return text


def tensors_of(model: nn.Module) -> Iterator[Tuple[str, Tensor]]:
    """The parameters and buffers of a model, by their names."""
    return chain(model.named_parameters(), model.named_buffers())
