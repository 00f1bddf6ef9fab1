"""Measure every module in bytes: weights, and what training keeps beside them."""

import copy
from dataclasses import dataclass, field
from typing import Callable, Dict, Optional, Set, Tuple, Union

import torch
from torch import nn

from mmdevplug.errors import PlacementError, first_line
from mmdevplug.utils.annotations import AnyConfig

from .walk_modules import named_tensors, prefixes

#: Counted where nothing names another one.
DEFAULT_OPTIMIZER = 'adamw'
#: Values an optimizer keeps for each value of a parameter.
STATE_VALUES = dict(
    adamw=2, adam=2, nadam=2, lamb=2, adagrad=1, rmsprop=1, momentum=1, lion=1, sgd=0, none=0
)


@dataclass(frozen=True)
class ModuleSizes:
    """Bytes by name of module or tensor; ``''`` is the whole, a module includes its children.

    A tensor that occurs under several names counts only under the first.
    """

    parameters: Dict[str, int] = field(default_factory=dict)  #: Weights.
    buffers: Dict[str, int] = field(default_factory=dict)  #: Buffers, persistent or not.
    #: Of the parameters that require them, if training.
    gradients: Dict[str, int] = field(default_factory=dict)
    #: The state of the optimizer, if training.
    optimizer: Dict[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        return sum(self.parts(name).values())

    def parts(self, name: str = '') -> Dict[str, int]:
        """The bytes of a module by what they are for."""
        return {kind: sizes.get(name, 0) for kind, sizes in vars(self).items()}


def state_values(optimizer: Union[str, int, float]) -> float:
    """Values of optimizer state for each value of a parameter, by name or as a number."""
    if isinstance(optimizer, str):
        found = STATE_VALUES.get(optimizer.lower())
        if found is not None:
            return found
    elif isinstance(optimizer, (int, float)) and 0 <= optimizer < float('inf'):
        return optimizer
    raise PlacementError(
        f'optimizer={optimizer!r}: expected one of {", ".join(STATE_VALUES)}, or how many values '
        f'it keeps for each value of a parameter, e.g. 2.'
    )


def state_factor(options: object) -> Tuple[Optional[float], str]:
    """Bytes of optimizer state for each byte of parameters, found by a step of a small matrix.

    ``options`` is ``optim_wrapper.optimizer`` of a config. If the optimizer cannot be tried alone,
    the result is None and why not.
    """
    if not isinstance(options, dict) or 'type' not in options:
        return None, 'the config has no optim_wrapper.optimizer.type'
    from mmengine.registry import OPTIMIZERS  # here: plans need no MMEngine

    weight = nn.Parameter(torch.zeros(64, 64, device='cpu'))
    weight.grad = torch.ones_like(weight)
    try:
        optimizer = OPTIMIZERS.build(dict(copy.deepcopy(options), params=[weight]))
        optimizer.step()
    except Exception as error:
        # It may need a closure, a process group or a device.
        return None, f'tried alone it fails with {type(error).__name__}: {first_line(error)}'
    tensors = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
    state = sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)
    return state / (weight.numel() * weight.element_size()), ''


def as_dtype(dtype: Union[None, str, torch.dtype]) -> Optional[torch.dtype]:
    """A dtype or its name, e.g. ``'bfloat16'``."""
    found = getattr(torch, dtype.replace('torch.', ''), None) if isinstance(dtype, str) else dtype
    if found is not None and not isinstance(found, torch.dtype) or (dtype and found is None):
        raise PlacementError(f"dtype={dtype!r}: expected the name of a dtype, e.g. 'bfloat16'.")
    return found


def module_sizes(
    model: nn.Module,
    dtype: Union[None, str, torch.dtype] = None,
    training: bool = False,
    optimizer: Union[str, int, float] = 'adamw',
) -> ModuleSizes:
    """Measure every module of a model, which may be on the meta device.

    Args:
        model (nn.Module): Any.
        dtype (torch.dtype or str, optional): What floating tensors will be cast to.
        training (bool): Also count gradients and the state of the optimizer, of parameters that
            require gradients, in the parameters' dtype.
        optimizer (str or number): A name of :data:`STATE_VALUES`, or how many values it keeps for
            each value of a parameter.

    Returns:
        ModuleSizes: Bytes by name.

    Raises:
        PlacementError: If an argument cannot be read.
    """
    kind = as_dtype(dtype)
    factor = state_values(optimizer)
    sizes = ModuleSizes()
    seen: Set[int] = set()
    for name, tensor in named_tensors(model):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        cast = kind is not None and tensor.is_floating_point()
        size = tensor.numel() * (torch.empty((), dtype=kind) if cast else tensor).element_size()
        if not isinstance(tensor, nn.Parameter):
            _add(sizes.buffers, name, size)
            continue
        _add(sizes.parameters, name, size)
        if training and tensor.requires_grad:
            _add(sizes.gradients, name, size)
            _add(sizes.optimizer, name, int(factor * size))
    return sizes


def _add(part: Dict[str, int], name: str, value: int) -> None:
    """Add what a module or tensor holds by itself to it and to the modules around it."""
    if value:
        for prefix in prefixes(name):
            part[prefix] = part.get(prefix, 0) + value


def choose_optimizer(
    given: Optional[str], cfg: Optional[AnyConfig], training: bool, say: Callable[[str], None]
) -> Union[str, int, float]:
    """Return the argument, or what the config's optimizer keeps, found by trying it."""
    if given is not None:
        try:
            return float(given)
        except ValueError:
            return given
    if cfg is None or not training:
        return DEFAULT_OPTIMIZER
    factor, why_not = state_factor((cfg.get('optim_wrapper') or {}).get('optimizer'))
    if factor is None:
        say(f'counting with {DEFAULT_OPTIMIZER}: {why_not}')
        return DEFAULT_OPTIMIZER
    return factor
