"""Copies of tensors on the host, as gloo takes them."""

from functools import lru_cache
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mmdevplug.utils.torch_compat import (
    UNSCALES_ON_HOST,
    is_at_least,
    is_functional,
    view_as_dtype,
)

#: Types that are added up in a wider one and rounded once.
_WIDER: Dict[torch.dtype, torch.dtype] = {torch.int16: torch.int32, torch.bool: torch.int32}
for _name in ('e4m3fn', 'e5m2', 'e4m3fnuz', 'e5m2fnuz'):
    if hasattr(torch, f'float8_{_name}'):  # since PyTorch 2.1
        _WIDER[getattr(torch, f'float8_{_name}')] = torch.float32

_HOST = torch.device('cpu')
#: Types in which sums overflow, or lose most of an addend.
HALVES = (torch.float16, torch.bfloat16)
_WIDER.update(dict.fromkeys(HALVES, torch.float32))

#: Of these, what gloo adds up by itself, with half the bytes.
_OF_GLOO = {torch.float16}
if is_at_least('2.9'):
    _OF_GLOO.add(torch.bfloat16)

#: Options of collectives take it, which PyTorch's annotations do not say.
SUM: Any = ReduceOp.SUM
_COMBINE: List[Tuple['ReduceOp.RedOpType', Callable[..., Tensor]]] = [
    (SUM, torch.add),
    (ReduceOp.PRODUCT, torch.mul),
    (ReduceOp.MIN, torch.minimum),
    (ReduceOp.MAX, torch.maximum),
    (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or),
    (ReduceOp.BXOR, torch.bitwise_xor),
]


if hasattr(ReduceOp, 'AVG'):  # since PyTorch 1.11
    _COMBINE.append((ReduceOp.AVG, torch.add))


def is_average(op: ReduceOp) -> bool:
    """Whether a reduction divides by the number of ranks."""
    return hasattr(ReduceOp, 'AVG') and op == ReduceOp.AVG


@lru_cache(None)
def pins_memory(device_type: str) -> bool:
    """Whether a device copies to memory that is page-locked while its program goes on."""
    module = getattr(torch, device_type, None)
    return device_type != 'cpu' and hasattr(module, 'Stream') and can_pin()


@lru_cache(None)
def _copy_stream(device: torch.device, to_host: bool) -> 'torch.Stream':
    """A stream for copies, which neither wait for later operations of the program nor delay them.

    There are two: a copy to the host waits for the program, which one from it need not.
    """
    return getattr(torch, device.type).Stream(device)


@lru_cache(None)
def can_pin() -> bool:
    """Whether PyTorch has page-locked memory for the accelerator of this process."""
    try:
        return torch.empty(1, dtype=torch.uint8, device='cpu', pin_memory=True).is_pinned()
    except RuntimeError:  # no accelerator, or one without such memory
        return False


class HostBuffers:
    """The tensors of one collective on the host, and where their results belong.

    A contiguous tensor of the host is its own copy.

    Attributes:
        due (list): What to call when gloo has finished.
        written (list): Tensors, and those of the host whose values they get then.
        copied (list): Events of copies that have begun, and what they read;
            :meth:`wait_for_copies` waits for them.
        beside (bool): Whether copies run beside the program of the device.
        finite (bool): Whether an average has neither NaN nor infinity.
    """

    def __init__(self) -> None:
        self.written: List[Tuple[Tensor, Tensor]] = []
        self.due: List[Callable[[], object]] = []
        self.copied: List[Tuple[torch.Event, Tensor]] = []
        self.beside, self.finite = False, True

    def read(self, tensor: Tensor, later: bool = False) -> Tensor:
        """Return the values of a tensor, flat; ``later`` for :meth:`wait_for_copies`."""
        values = tensor.detach()
        if _is_plain(values):
            return values.flatten()
        values = (values.resolve_conj() if tensor.is_complex() else values).resolve_neg()
        if later and pins_memory(values.device.type):
            room, source, self.beside = self._room(values), values.reshape(-1), True
            program = getattr(torch, values.device.type).current_stream(values.device)
            _copy_stream(values.device, True).wait_stream(program)
            self._copy_beside(room, source, True)
            return room
        return values.cpu().contiguous().flatten()

    def _copy_beside(self, to: Tensor, source: Tensor, to_host: bool) -> None:
        device = source.device if to_host else to.device
        stream = _copy_stream(device, to_host)
        with getattr(torch, device.type).stream(stream):
            to.copy_(source, non_blocking=True)
        self.copied.append((stream.record_event(), source))

    def wait_for_copies(self) -> None:
        """Wait until copies that have begun are done."""
        for event, _ in self.copied:
            event.synchronize()
        self.copied = []

    def write(self, tensor: Tensor) -> Tensor:
        """Return room for new values of a tensor, flat."""
        if _is_plain(tensor):
            return tensor.detach().flatten()
        _refuse_overlap(tensor)
        room = self._room(tensor)
        self.written.append((tensor, room))
        return room

    @staticmethod
    def _room(tensor: Tensor) -> Tensor:
        pinned = pins_memory(tensor.device.type)
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device='cpu', pin_memory=pinned)

    def change(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, which the collective replaces, flat; see ``later``."""
        if _is_plain(tensor):
            return tensor.detach().flatten()
        _refuse_overlap(tensor)
        values = self.read(tensor, later=True)
        self.written.append((tensor, values))
        return values

    def share(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor for threads to read and replace, flat."""
        values = tensor.detach()
        plain = values.is_contiguous() and not values.is_neg() and not is_functional(values)
        if plain and not pins_memory(values.device.type):  # these threads know no streams
            return values.view(-1)
        values = self.change(tensor)
        self.wait_for_copies()
        return values

    def copy_back(self) -> None:
        """Give the tensors their new values, and forget what would keep these alive."""
        for function in self.due:
            function()
        for tensor, values in self.written:
            if self.beside and tensor.device.type != 'cpu':
                self._copy_beside(tensor, values.view(tensor.shape), False)
            else:
                tensor.copy_(values.view(tensor.shape))
        self.wait_for_copies()
        self.due, self.written = [], []


def _is_plain(tensor: Tensor) -> bool:
    """Whether gloo can read and write the memory of a tensor as it is."""
    plain = tensor.device == _HOST and tensor.is_contiguous()
    return plain and not (tensor.is_neg() or tensor.is_conj())


def _refuse_overlap(tensor: Tensor) -> None:
    if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride())):
        raise ValueError(
            f'a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has '
            f'elements that share memory and cannot be written; call clone()'
        )


def as_bytes(flat: Tensor) -> Tensor:
    """Return the memory of a flat tensor, of any type: gloo moves bytes of each."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return view_as_dtype(flat, torch.uint8)


def summand(flat: Tensor) -> Tensor:
    """Return the values in a type that gloo adds up; the tensor itself where that is its own."""
    wider = None if flat.dtype in _OF_GLOO else _WIDER.get(flat.dtype)
    return flat if wider is None else flat.to(wider)


def check_reduction(op: ReduceOp) -> None:
    """Refuse a reduction that gloo and this module do not have.

    Raises:
        ValueError: If it is unknown.
    """
    for known, _ in _COMBINE:
        if op == known:
            return
    members = ReduceOp.RedOpType.__members__.items()
    name = next((name for name, member in members if op == member), str(op))
    raise ValueError(
        f'{name} is not among SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR: scale the '
        f'tensors before or after the collective'
    )


def combine(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Reduce the parts of all ranks, in the order of the ranks."""
    function = next(function for known, function in _COMBINE if op == known)
    wider = _WIDER.get(parts[0].dtype, parts[0].dtype)
    result = parts[0].to(wider)
    for part in parts[1:]:
        result = function(result, part.to(wider))
    if is_average(op):
        result = averaged(result, len(parts))
    return result.to(parts[0].dtype)


def averaged(total: Tensor, count: int) -> Tensor:
    """Divide; integers are rounded to zero, as by NCCL."""
    exact = total.is_floating_point() or total.is_complex()
    return torch.div(total, count, rounding_mode=None if exact else 'trunc')


def scale(flat: Tensor, factor: float) -> bool:
    """Multiply a tensor in place by at most 1; returns whether all its values are finite."""
    if flat.dtype not in (torch.float32, torch.float64):
        exact = flat.to(torch.float32)  # PyTorch 1 multiplies no halves on the CPU
        finite = scale(exact, factor)
        flat.copy_(exact)
        return finite
    if UNSCALES_ON_HOST and flat.dtype != torch.float64:
        found = torch.zeros(1, dtype=torch.float32, device=flat.device)
        factor_there = torch.tensor([factor], dtype=torch.float32, device=flat.device)
        torch._amp_foreach_non_finite_check_and_unscale_([flat], found, factor_there)
        return not found.item()
    flat.mul_(factor)
    return is_finite(flat)


def is_finite(flat: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity."""
    # A sum of finite values may overflow, but one of NaN or infinity is never finite.
    return bool(torch.isfinite(flat.sum())) or bool(torch.isfinite(flat).all())
