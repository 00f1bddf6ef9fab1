"""A plan: which device holds which part of a model, and why."""

import io
import os
from dataclasses import asdict, dataclass
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from mmdevplug.errors import PlacementError
from mmdevplug.model.move import same_device
from mmdevplug.utils.byte_sizes import format_bytes

from .parse_devices import device_weights
from .walk_modules import named_tensors, nearest

Signature = Tuple[Tuple[str, Tuple[int, ...]], ...]

#: Begins the step of a plan that says that it is uneven.
WARNING = 'warning: '
#: Of :meth:`DevicePlan.to_dict`; changes when a key changes its meaning or goes.
SCHEMA = 2


def ideal_loads(loads: Collection[float], weights: Collection[float]) -> List[float]:
    """The loads of a perfect split: in proportion to the weights of the devices."""
    total, share = sum(loads), sum(weights)
    return [total * weight / share if share else 0.0 for weight in weights]


def imbalance(loads: Collection[float], weights: Collection[float]) -> float:
    """The largest ``|load - ideal| / ideal``; empty devices of weight 0 are passed over."""
    relative = [
        abs(load - ideal) / ideal if ideal else float('inf')
        for load, ideal in zip(loads, ideal_loads(loads, weights))
        if ideal or load
    ]
    return max(relative, default=0.0)


def signature_of(tensors: Iterable[Tuple[str, Tensor]]) -> Signature:
    """Name and shape of every tensor."""
    return tuple((name, tensor.shape) for name, tensor in tensors)


@dataclass(frozen=True)
class PlannedBlock:
    """A block that was put on one device; modules without parameters are not listed.

    Attributes:
        name (str): Of the module or tensor; ``''`` is the whole model.
        kind (str): Its class, ``'Parameter'`` or ``'Buffer'``.
        bytes (int): What it holds there; 0 for what another block counts (tied weights).
        device (str): Where it is.
    """

    name: str
    kind: str
    bytes: int
    device: str


@dataclass(frozen=True)
class DevicePlan:
    """A device map and why."""

    #: Name of a module or tensor to device, e.g. ``'xla:0'``. Every parameter and buffer is
    #: covered by its own name or that of a module around it.
    device_map: Dict[str, str]
    devices: List[str]  #: In the order they are filled.
    #: Bytes each may hold; None if they are taken for equal. One without a limit is not in it.
    capacities: Optional[Dict[str, int]]
    loads: Dict[str, int]  #: Bytes on each device.
    strategy: str  #: ``'auto'``, ``'balanced'`` or ``'dynamic'``.
    steps: List[str]  #: The attempts and their reasons, in sentences.
    blocks: List[PlannedBlock]  #: In order of registration.
    parts: Dict[str, int]  #: Bytes of the model by what they are for.
    signature: Signature  #: Signature of the planned model.
    model: str = ''  #: The class of the model.

    @property
    def weights(self) -> Dict[str, float]:
        """The weight of each device: its capacity, or 1. The host is left out."""
        weights = device_weights(self.devices, self.capacities)
        if len(weights) > 1:
            weights.pop('cpu', None)
        return weights

    @property
    def imbalance(self) -> float:
        """The largest ``|load - ideal| / ideal`` over devices, in bytes; 0 is perfect."""
        weights = self.weights
        return imbalance([self.loads[name] for name in weights], weights.values())

    @property
    def bottleneck(self) -> float:
        """The largest load relative to its ideal; 1 is perfect."""
        relative = [self.loads[name] / ideal for name, ideal in self.ideals.items() if ideal]
        return max(relative, default=0.0)

    @property
    def ideals(self) -> Dict[str, float]:
        """Bytes of each device in a perfect split. The host is left out."""
        weights = self.weights
        loads = [self.loads[name] for name in weights]
        return dict(zip(weights, ideal_loads(loads, weights.values())))

    @property
    def warning(self) -> str:
        """Why the plan is uneven; ``''`` if it is even enough."""
        found = (step for step in self.steps if step.startswith(WARNING))
        return next(found, '').replace(WARNING, f'The plan of {self.model} is ')

    def device_of(self, name: str) -> torch.device:
        """Where a module or tensor is.

        Args:
            name (str): As in ``named_modules``, ``named_parameters`` or ``named_buffers``.

        Raises:
            PlacementError: If the plan does not know it, or splits it.
        """
        found = nearest(name, self.device_map)
        if found is not None:
            return torch.device(self.device_map[found])
        inside = {
            d for key, d in self.device_map.items() if key.startswith(f'{name}.') or not name
        }
        if len(inside) == 1:
            return torch.device(inside.pop())
        reason = f'is split over {", ".join(sorted(inside))}' if inside else 'is not in the model'
        raise PlacementError(f'{name or "the whole model"!r} {reason}; ask for what is inside it.')

    def check(self, model: nn.Module) -> None:
        """Refuse a model that the plan was not made for.

        Raises:
            PlacementError: Naming the first difference.
        """
        planned, found = dict(self.signature), dict(signature_of(named_tensors(model)))
        differences = [
            f'{name} {list(shape)} is not in the plan'
            if name not in planned
            else f'{name} has the shape {list(shape)}, planned was {list(planned[name])}'
            for name, shape in found.items()
            if planned.get(name) != shape
        ]
        differences += [f'{name} is missing' for name in planned if name not in found]
        if differences:
            raise PlacementError(
                f'the plan was made for another model ({self.model}, now '
                f'{type(model).__name__}): {differences[0]}. Plan again for this model.'
            )

    def check_placed(self, model: nn.Module) -> None:
        """Refuse a dispatched model whose tensors were moved or untied since.

        Raises:
            PlacementError: Naming the first tensor that is elsewhere, or the names that were one.
        """
        tensors = dict(named_tensors(model))
        for name, _ in self.signature:
            if name not in tensors:
                continue
            found, planned = tensors[name].device, self.device_of(name)
            if not same_device(found, planned):
                owner = name.rpartition('.')[0]
                if not hasattr(model.get_submodule(owner), '_dispatched'):
                    raise PlacementError(
                        f'{owner} of {type(model).__name__} is another module than at dispatch(): '
                        f'it was replaced, and is on {found}, planned was {planned}. Replace it '
                        f'before dispatch(), which makes a layer move its inputs.'
                    )
                raise PlacementError(
                    f'{name} of {type(model).__name__} is on {found}, planned was {planned}: '
                    f'something has moved it since dispatch(). Remove the call of to(), cpu() or '
                    f'cuda(), and dispatch a new model.'
                )
        ties: Any = model.device_ties
        for names in ties:
            if len({id(tensors[name]) for name in names if name in tensors}) > 1:
                raise PlacementError(
                    f'{" and ".join(names)} of {type(model).__name__} were one tensor at '
                    f'dispatch() and are several now, which train apart. Tie them again, or '
                    f'remove what moved or replaced one of them.'
                )

    def to_dict(self) -> Dict[str, object]:
        """A dict for JSON; :meth:`from_dict` reads it."""
        return dict(
            schema=SCHEMA,
            **{name: value for name, value in asdict(self).items() if name != 'signature'},
            signature=[[name, list(shape)] for name, shape in self.signature],
            imbalance=self.imbalance,
        )

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> 'DevicePlan':
        """Read what :meth:`to_dict` made.

        Raises:
            PlacementError: If something is missing or of another kind.
        """
        try:
            if found['schema'] != SCHEMA:
                raise PlacementError(f'schema={found["schema"]}: this version reads {SCHEMA}.')
            names = [n for n in cls.__dataclass_fields__ if n not in ('blocks', 'signature')]
            return cls(
                **{name: found[name] for name in names},
                blocks=[PlannedBlock(**block) for block in found['blocks']],
                signature=tuple((name, tuple(shape)) for name, shape in found['signature']),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlacementError(
                f'this is no plan ({type(error).__name__}: {error}). Give what '
                f'DevicePlan.to_dict or `mmdevplug plan --json` wrote.'
            ) from error

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=110, no_color=True).print(self)
        return '\n'.join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich__(self) -> Group:
        """A row for each device, then what was tried."""
        parts = ', '.join(f'{name} {format_bytes(s)}' for name, s in self.parts.items() if s)
        title = f'{self.model}, {self.strategy}: {parts}'
        # Narrow, so that names of modules are whole in a terminal of 80 columns.
        table = Table(title=title, title_justify='left', box=SIMPLE_HEAD, pad_edge=False)
        within = _common_parent([block.name for block in self.blocks])
        limited = ['may hold'] if self.capacities else []
        for name in ('device', 'load', 'of ideal', *limited, 'blocks', 'from', 'to'):
            right = name not in ('device', 'from', 'to')
            table.add_column(name, justify='right' if right else 'left', overflow='fold')
        ideals = self.ideals
        for name in self.devices:
            ideal = ideals.get(name)
            here = [block.name for block in self.blocks if block.device == name]
            here = [each[len(within) :] for each in here]
            limit = (self.capacities or {}).get(name)
            table.add_row(
                name,
                format_bytes(self.loads[name]),
                f'{self.loads[name] / ideal:.1%}' if ideal else '',
                *['' if limit is None else format_bytes(limit)] * len(limited),
                str(len(here)),
                here[0] or 'all' if here else '',
                here[-1] or 'all' if here else '',
            )
        figures = Text(f'imbalance {self.imbalance:.3f} in bytes')
        steps = [f'names begin with {within}'] * bool(within) + [*self.steps]
        return Group(table, figures, *[Text(f'- {step}') for step in steps])


def _common_parent(names: Sequence[str]) -> str:
    """The common prefix of all names, up to a dot."""
    parent = os.path.commonprefix(names).rpartition('.')[0] if len(names) > 1 else ''
    return f'{parent}.' if parent else ''
