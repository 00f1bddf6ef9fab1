"""Compare the operators of a training step on a device one by one with the CPU's."""

import re
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor, nn

from mmdevplug.utils.pytree import replace_parts, tensors_in
from mmdevplug.utils.torch_compat import DISPATCH_MODES, DispatchMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: How far results may be apart, relative to the largest of a tensor: TF32 of CUDA included.
TOLERANCE = 5e-3
#: The same in 16 bits.
TOLERANCE_OF_HALF = 0.1
#: What operands, or weights, that are moved by rounding change may be exceeded so far.
SPREAD = 20.0
ROUNDING = 1e-6
#: Their results are not unique, are drawn, or are memory that nobody wrote.
_NOT_COMPARED = re.compile(
    r'.*(svd|eig|qr\b|linalg_lu|ldl|empty|resize|rand|bernoulli|dropout|normal|uniform).*'
)
_STATISTICS = ('running_mean', 'running_var')
_HALF = (torch.float16, torch.bfloat16)


class Place(NamedTuple):
    """Which operators are compared: those of one call of a module, or of the backward pass."""

    module: Optional[str]  # None: what runs outside of all modules
    call: int = 1
    number: int = 0  # of the output of the module
    backward: bool = False  # until the gradient of this output, or of a weight, has arrived
    weight: Optional[str] = None


class Operator(NamedTuple):
    """An operator that computes otherwise on a device, from the same operands."""

    name: str
    there: float
    here: float


class OperatorComparison(DispatchMode):
    """Compute each operator at a place on the CPU, too, and keep the first that differs.

    Its :meth:`watching` is used like that of ``Record``, around another step on the device.

    Attributes:
        first (Operator, optional): The first that differs.
        compared (int): How many operators were compared.
    """

    def __init__(self, device_type: str, place: Place) -> None:
        if not DISPATCH_MODES:
            raise RuntimeError(f'torch {torch.__version__} cannot look at single operators')
        super().__init__()
        self.first: Optional[Operator] = None
        self.compared = 0
        self._device_type, self._place = device_type, place
        self._calls: Dict[str, int] = {}
        self._inside: List[str] = []  # names of modules whose forward() runs
        self._in_backward = self._arrived = self._entered = False

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follow the modules of a model while its losses are computed."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave(name)))
        if self._place.weight is not None:
            weight = dict(model.named_parameters())[self._place.weight]
            handles.append(weight.register_hook(self._arrive))
        try:
            self._follow()
            yield
        finally:
            self._follow(False)
            for handle in handles:
                handle.remove()

    def begin_backward(self) -> None:
        """Note that the backward pass begins."""
        self._in_backward = True
        self._follow()

    def _follow(self, allowed: bool = True) -> None:
        """Be a mode at the place alone: tensors of torch_xla that are made in one are others."""
        here = allowed and self._is_here()
        if here and not self._entered:
            self.__enter__()
        elif self._entered and not here:
            self.__exit__(None, None, None)
        self._entered = here

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._inside.append(name)
            self._follow()

        return enter

    def _leave(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def leave(_: nn.Module, __: object, output: object) -> None:
            self._inside.pop()
            call = self._calls[name] = self._calls.get(name, 0) + 1
            self._follow()
            if not self._place.backward or (name, call) != self._place[:2]:
                return
            tensor = tensors_in(output)[self._place.number]
            tensor.register_hook(self._arrive)

        return leave

    def _arrive(self, _: object) -> None:
        self._arrived = True

    def _is_here(self) -> bool:
        if self.first is not None or self._in_backward != self._place.backward:
            return False
        if self._in_backward:
            return not self._arrived
        inside = self._inside[-1] if self._inside else None
        return inside == self._place.module and (
            inside is None or self._calls.get(inside, 0) + 1 == self._place.call
        )

    def __torch_dispatch__(
        self,
        func: 'OpOverload',
        types: Sequence[type],
        args: Tuple = (),
        kwargs: Optional[Dict[str, object]] = None,
    ) -> object:
        kwargs = kwargs or {}
        if not self._is_here() or not _is_comparable(func):
            return func(*args, **kwargs)
        before = [replace_parts(each, _on_host) for each in (list(args), kwargs)]
        result = func(*args, **kwargs)
        written = [args[i] for i in _written(func) if i < len(args)]
        found = [*tensors_in(result), *tensors_in(written)]
        if any(each.device.type == self._device_type for each in found):
            self._compare(func, before, found)
        return result

    def _compare(self, func: 'OpOverload', operands: List[Any], found: List[Tensor]) -> None:
        kwargs = {
            key: torch.device('cpu') if isinstance(value, torch.device) else value
            for key, value in operands[1].items()
        }
        expected = _compute(func, operands[0], kwargs)
        if expected is None or len(expected) != len(found):
            return
        self.compared += 1
        moved: Optional[List[Tensor]] = None
        for number, (there, here) in enumerate(zip(found, expected)):
            place = _difference(there.detach().cpu(), here, None)
            if place is None:
                continue
            if moved is None:
                moved = _compute(func, replace_parts(operands[0], _moved), kwargs) or expected
            place = _difference(there.detach().cpu(), here, moved[number])
            if place is not None:
                shapes = [tuple(each.shape) for each in (there, here)]
                differ = shapes[0] != shapes[1]
                said = f' (of shape {shapes[0]} for {shapes[1]})' if differ else ''
                self.first = Operator(_name(func) + said, *place)
                return


def _is_comparable(func: 'OpOverload') -> bool:
    """Whether its results are new values that the operands decide."""
    drawn = getattr(torch, 'Tag', None)
    drawn = getattr(drawn, 'nondeterministic_seeded', None)
    if (drawn is not None and drawn in func.tags) or _NOT_COMPARED.match(_name(func)):
        return False
    returns = [each.alias_info for each in func._schema.returns]
    return any(alias is None or alias.is_write for alias in returns)


def _written(func: 'OpOverload') -> List[int]:
    """The positions of the operands that an operator writes."""
    found = []
    for i, operand in enumerate(func._schema.arguments):
        alias = operand.alias_info
        # The schema of native_batch_norm does not say that it writes its statistics.
        if operand.name in _STATISTICS or (alias is not None and alias.is_write):
            found.append(i)
    return found


def _name(func: 'OpOverload') -> str:
    return re.sub(r'\.default$', '', str(func))


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to('cpu', copy=True)


def _moved(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    # Of 16 bits, the last one.
    rounding = 4e-3 if tensor.dtype in _HALF else ROUNDING
    return tensor * (1 + rounding * torch.randn_like(tensor))


def _compute(
    func: 'OpOverload', args: List[object], kwargs: Dict[str, object]
) -> Optional[List[Tensor]]:
    """Results and written operands on the CPU; None if it has no such kernel."""
    args, kwargs = replace_parts(args, Tensor.clone), replace_parts(kwargs, Tensor.clone)
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError):  # of a vendor alone, or not in this dtype
        return None
    return [*tensors_in(result), *tensors_in([args[i] for i in _written(func) if i < len(args)])]


def _difference(
    there: Tensor, here: Tensor, moved: Optional[Tensor]
) -> Optional[Tuple[float, float]]:
    """Both values where they are farthest apart, if that is more than is allowed."""
    if here.is_complex() or here.layout is not torch.strided or not here.numel():
        return None
    if there.shape != here.shape:
        value = float(there.flatten()[0]) if there.numel() else float('nan')
        return value, float(here.flatten()[0])
    half = here.dtype in _HALF or there.dtype in _HALF
    one, other = here.double(), there.double()
    finite = torch.isfinite(one)
    if moved is not None:
        if moved.shape != here.shape:
            return None
        finite &= torch.isfinite(moved)
    if not bool(finite.any()):
        return None
    one, other = one[finite], other[finite]
    exact = not (here.is_floating_point() or there.is_floating_point())
    allowed = 0.0 if exact else (TOLERANCE_OF_HALF if half else TOLERANCE) * float(one.abs().max())
    if moved is not None:
        allowed = max(allowed, SPREAD * float((moved.double()[finite] - one).abs().max()))
    apart = (other - one).abs()
    apart[~torch.isfinite(other)] = float('inf')
    place = int(apart.argmax())
    if float(apart[place]) <= allowed:
        return None
    return float(other[place]), float(one[place])
