"""Copies of tensors on the host, as gloo takes them."""

from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

#: Types that are added up in a wider one and rounded once.
_WIDER: Dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int16: torch.int32,
    torch.bool: torch.int32,
}
_WIDER.update(
    {
        getattr(torch, name): torch.float32
        for name in ('float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz')
        if hasattr(torch, name)  # since PyTorch 2.1
    }
)

#: Of these, what gloo adds up by itself, with half the bytes.
_OF_GLOO = {torch.float16}
if tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 9):
    _OF_GLOO.add(torch.bfloat16)

_COMBINE: List[Tuple[Any, Callable[..., Tensor]]] = [
    (ReduceOp.SUM, torch.add),
    (ReduceOp.AVG, torch.add),
    (ReduceOp.PRODUCT, torch.mul),
    (ReduceOp.MIN, torch.minimum),
    (ReduceOp.MAX, torch.maximum),
    (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or),
    (ReduceOp.BXOR, torch.bitwise_xor),
]


class HostBuffers:
    """The tensors of one collective on the host, and where their results belong.

    A contiguous tensor of the host is its own copy.
    """

    def __init__(self) -> None:
        self._written: List[Tuple[Tensor, Tensor]] = []
        self._due: List[Callable[[], Any]] = []

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, flat."""
        values = tensor.detach()
        if tensor.is_complex():
            values = values.resolve_conj()
        return values.resolve_neg().cpu().contiguous().reshape(-1)

    def write(self, tensor: Tensor) -> Tensor:
        """Return room for new values of a tensor, flat."""
        if tensor.device.type == 'cpu' and tensor.is_contiguous():
            return tensor.detach().view(-1)
        _refuse_overlap(tensor)
        room = torch.empty(tensor.numel(), dtype=tensor.dtype)
        self._written.append((tensor, room))
        return room

    def change(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, which the collective replaces, flat."""
        values = self.read(tensor)
        if tensor.device.type != 'cpu' or values.data_ptr() != tensor.data_ptr():
            _refuse_overlap(tensor)
            self._written.append((tensor, values))
        return values

    def before_copying(self, function: Callable[[], Any]) -> None:
        """Call a function when gloo has finished."""
        self._due.append(function)

    def copy_back(self) -> None:
        """Give the tensors their new values."""
        for function in self._due:
            function()
        for tensor, values in self._written:
            tensor.copy_(values.view(tensor.shape))


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
    return flat.view(torch.uint8)


def summand(flat: Tensor) -> Tensor:
    """Return the values in a type that gloo adds up; the tensor itself where that is its own."""
    return flat if flat.dtype in _OF_GLOO else _wider(flat)


def _wider(flat: Tensor) -> Tensor:
    return flat.to(_WIDER.get(flat.dtype, flat.dtype))


def check_reduction(op: Any) -> None:
    """Refuse a reduction that gloo and this module do not have.

    Raises:
        ValueError: If it is unknown.
    """
    if not any(op == known for known, _ in _COMBINE):
        members = ReduceOp.RedOpType.__members__.items()
        name = next((name for name, member in members if op == member), str(op))
        raise ValueError(
            f'{name} is not among SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR: scale the '
            f'tensors before or after the collective'
        )


def combine(parts: Sequence[Tensor], op: Any) -> Tensor:
    """Reduce the parts of all ranks, in the order of the ranks."""
    function = next(function for known, function in _COMBINE if op == known)
    result = _wider(parts[0])
    for part in parts[1:]:
        result = function(result, _wider(part))
    if op == ReduceOp.AVG:
        result = averaged(result, len(parts))
    return result.to(parts[0].dtype)


def averaged(total: Tensor, count: int) -> Tensor:
    """Divide; integers are rounded to zero, as by NCCL."""
    exact = total.is_floating_point() or total.is_complex()
    return torch.div(total, count, rounding_mode=None if exact else 'trunc')
