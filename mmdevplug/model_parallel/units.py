"""Divide a model into a sequence of blocks, each of which stays on one device."""

import os
import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from torch import nn

from .sizes import ModuleSizes
from .unsplittable import WholeModules
from .walk_modules import all_modules, class_or_own, named_tensors, nearest, tied_names


@dataclass
class Unit:
    """A module that is not split, or a tensor that a split module holds itself."""

    name: str
    kind: str  # the class, 'Parameter' or 'Buffer'
    holds: bool  # whether it has parameters
    owner: Optional[str] = None  # the module that holds it, if this is a single tensor


@dataclass
class Group:
    """Units that share a device, in order of registration."""

    units: List[Unit]
    bytes: int
    depth: int = 0  # how many modules the cut before it splits

    @property
    def label(self) -> str:
        """The names, shortened."""
        names = [unit.name or 'the whole model' for unit in self.units if unit.holds]
        names = names or [unit.name for unit in self.units]
        more = f' with {len(names) - 2} more' if len(names) > 2 else ''
        return ' and '.join(names[:2]) + more


def find_units(model: nn.Module, whole: WholeModules) -> List[Unit]:
    """Cut a model into units, in order of registration."""

    def walk(name: str, module: nn.Module) -> Iterator[Unit]:
        children = {key: child for key, child in module._modules.items() if child is not None}
        if not children or (name, module) in whole:
            yield Unit(name, type(module).__name__, _holds(module))
            return
        prefix = f'{name}.' if name else ''
        for kind, place in (('Parameter', module._parameters), ('Buffer', module._buffers)):
            for key, tensor in place.items():
                if tensor is not None:
                    yield Unit(prefix + key, kind, kind == 'Parameter', name)
        for key, child in children.items():
            yield from walk(prefix + key, child)

    return list(walk('', model))


def _holds(module: nn.Module) -> bool:
    """Whether there is a parameter inside a module."""
    return any(tensor is not None for tensor in module._parameters.values()) or any(
        child is not None and _holds(child) for child in module._modules.values()
    )


def group_units(
    units: List[Unit], sizes: ModuleSizes, shared: Iterable[List[str]] = ()
) -> List[Group]:
    """Group units, which are in order of registration, that have to share a device.

    A tensor of a split module goes with the module after it; a module without parameters with the
    group before it; and units that share a tensor (see :func:`shared_names`) with the first of
    them.
    """
    raw: List[List[Unit]] = []
    pending: List[Unit] = []
    for unit in units:
        pending.append(unit)
        if unit.owner is not None:
            continue
        if any(u.holds for u in pending) or not raw:
            raw.append(pending)
        else:
            raw[-1] += pending
        pending = []
    if len(raw) > 1 and not any(u.holds for u in raw[0]):
        raw[:2] = [raw[0] + raw[1]]
    joined = _join_shared(raw, shared)
    groups = []
    for index, found in enumerate(joined):
        group = Group(found, sum(sizes[u.name] for u in found))
        if index:
            before, after = joined[index - 1][-1].name.split('.'), found[0].name.split('.')
            group.depth = len(os.path.commonprefix([before, after]))
        groups.append(group)
    return groups


def _join_shared(raw: List[List[Unit]], shared: Iterable[List[str]]) -> List[List[Unit]]:
    """Join the lists of units that hold the same tensor to the first of them."""
    index_of = {unit.name: index for index, units in enumerate(raw) for unit in units}
    parent = list(range(len(raw)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    for names in shared:
        places = sorted({root(index_of[str(nearest(name, index_of))]) for name in names})
        for place in places[1:]:
            parent[place] = places[0]
    joined: Dict[int, List[Unit]] = {}
    for index, units in enumerate(raw):
        joined.setdefault(root(index), []).extend(units)
    return [joined[index] for index in sorted(joined)]


def shared_names(model: nn.Module) -> List[List[str]]:
    """Names of each tensor that has several, and of those that transformers will tie."""
    tensors = named_tensors(model)
    found = tied_names(tensors)
    for owner, module in all_modules(model):
        for patterns in _ties(module):
            prefix = f'{owner}.' if owner else ''
            inside = [name for name, _ in tensors if name.startswith(prefix)]
            found.append([n for p in patterns for n in inside if _fits(p, n[len(prefix) :])])
    return [names for names in found if len(names) > 1]


def _fits(pattern: str, name: str) -> bool:
    try:
        return name == pattern or re.search(rf'{pattern}\Z', name) is not None
    except re.error:
        return False


def _ties(module: nn.Module) -> List[Tuple[str, ...]]:
    """Names that ``_tied_weights_keys`` of transformers ties, if the config turns it on."""
    keys = class_or_own(module, '_tied_weights_keys')
    if not keys or not getattr(getattr(module, 'config', None), 'tie_word_embeddings', False):
        return []
    if isinstance(keys, Mapping):
        return list(keys.items())
    # Before transformers 5: a list of names that are tied to the input embeddings.
    model: Any = module
    embeddings = model.get_input_embeddings()
    names = [n for n, m in module.named_modules() if m is embeddings]
    return [(*keys, *(f'{name}.weight' for name in names))]
