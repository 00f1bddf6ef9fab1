"""Walk nested containers of tensors and replace their leaves."""

import copy
import dataclasses
import sys
from collections import OrderedDict
from functools import lru_cache
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    overload,
)

import torch
from torch import Tensor

#: Keys, fields or indices.
Names = Tuple[Any, ...]
Nested = TypeVar('Nested')


class Container(NamedTuple):
    """How a kind of container is flattened and rebuilt."""

    names: Callable[[Any], Names]  # of the parts; indices for a sequence
    parts: Callable[[Any], List[object]]  # in the order of their names
    # From a type, names and parts, without constructors that do more than store them.
    build: Callable[[type, Names, Sequence[object]], object]
    step: Callable[[Any], str]  # the access to a name in Python: '.x', "['x']"


def _build_dataclass(kind: type, names: Names, parts: Sequence[object]) -> object:
    made: object = object.__new__(kind)
    for name, part in zip(names, parts):
        object.__setattr__(made, name, part)  # the class may be frozen
    return made


def _field_names(value: Any) -> Names:
    # Sorted: sets have another order in each process. The value of a property has its own name.
    fields = [('', name) for name in sorted(value._data_fields) if not _is_property(value, name)]
    return tuple(fields + [('metainfo', name) for name in sorted(value._metainfo_fields)])


def _is_property(value: object, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), property)


def _build_element(kind: type, names: Names, parts: Sequence[object]) -> object:
    made: Any = object.__new__(kind)
    element_type().__init__(made)
    for (place, name), part in zip(names, parts):
        # Lengths were checked on the sender.
        object.__setattr__(made, name, part)
        fields = made._metainfo_fields if place else made._data_fields
        fields.add(name)
        if _is_property(made, name.lstrip('_')):
            fields.add(name.lstrip('_'))
    return made


def _indices(value: Sequence) -> Names:
    return tuple(range(len(value)))


DICT = Container(
    names=tuple,
    parts=lambda value: list(value.values()),
    build=lambda kind, names, parts: kind(zip(names, parts)),
    step='[{!r}]'.format,
)
LIST = Container(_indices, list, lambda kind, names, parts: list(parts), DICT.step)
TUPLE = Container(_indices, list, lambda kind, names, parts: tuple(parts), DICT.step)
NAMED_TUPLE = Container(
    names=lambda value: value._fields,
    parts=list,
    build=lambda kind, names, parts: tuple.__new__(kind, parts),
    step='.{}'.format,
)
DATACLASS = Container(
    names=lambda value: tuple(each.name for each in dataclasses.fields(value)),
    parts=lambda value: [getattr(value, each.name) for each in dataclasses.fields(value)],
    build=_build_dataclass,
    step='.{}'.format,
)
ELEMENT = Container(
    names=_field_names,
    parts=lambda value: [getattr(value, name) for _, name in _field_names(value)],
    build=_build_element,
    step=lambda name: f'.{name[1]}',
)

_BUILT_IN: Dict[type, Container] = {dict: DICT, OrderedDict: DICT, list: LIST, tuple: TUPLE}
#: Classes of users, each as a container with a single part.
_registered: Dict[type, Container] = {}
#: Types of values without parts.
LEAVES: FrozenSet[type] = frozenset({str, bytes, bool, int, float, complex, type(None)})


def element_type() -> Any:
    """MMEngine's ``BaseDataElement``; None if it has not been imported."""
    # Importing it imports vendors' packages, whose failures detection reports.
    structures = sys.modules.get('mmengine.structures')
    return None if structures is None else structures.BaseDataElement


@lru_cache(maxsize=512)
def container_of(kind: type) -> Optional[Container]:
    """The container of a type; None for a leaf."""
    if kind in _BUILT_IN or kind in _registered:
        return _BUILT_IN.get(kind) or _registered[kind]
    if issubclass(kind, (dict, list)):
        return None  # it may have attributes besides its items
    if issubclass(kind, tuple) and hasattr(kind, '_fields'):
        return NAMED_TUPLE
    element = element_type()
    if element is not None and issubclass(kind, element):
        return ELEMENT
    return DATACLASS if dataclasses.is_dataclass(kind) else None


def register_sample_type(
    kind: type,
    to_sample: Callable[[Any], object] = vars,
    from_sample: Optional[Callable[[Any], object]] = None,
) -> None:
    """Let objects of a class travel between ranks and devices as samples do; on all ranks alike.

    Args:
        kind (type): The class, not its subclasses.
        to_sample (callable): Returns what an object consists of, as tensors, arrays, numbers,
            strings and containers. Defaults to ``vars``: its attributes.
        from_sample (callable, optional): Makes an object of that. It is run with what another rank
            sent. Defaults to None: attributes are set, and no constructor is called.

    Examples:
        >>> register_sample_type(Rollout)
        >>> register_sample_type(PIL.Image.Image, numpy.asarray, PIL.Image.fromarray)
    """

    def from_attributes(attributes: Any) -> object:
        made: object = object.__new__(kind)
        for name, value in attributes.items():
            object.__setattr__(made, name, value)
        return made

    make = from_attributes if from_sample is None else from_sample
    _registered[kind] = Container(
        names=lambda value: ('',),
        parts=lambda value: [to_sample(value)],
        build=lambda kind, names, parts: make(parts[0]),
        step=lambda name: '',
    )
    container_of.cache_clear()


def is_registered(kind: type) -> bool:
    """Whether users have registered a class."""
    return kind in _registered


def is_opaque(kind: type) -> bool:
    """Whether objects of a class are never stacked: a data element, or a class of users."""
    return is_registered(kind) or container_of(kind) is ELEMENT


@overload
def replace_parts(nested: Nested, function: Callable[[Tensor], Tensor]) -> Nested: ...


@overload
def replace_parts(
    nested: object, function: Callable[[Tensor], Tensor], other: Optional[Callable[[Any], object]]
) -> Any: ...


def replace_parts(
    nested: Any,
    function: Callable[[Tensor], Tensor],
    other: Optional[Callable[[Any], object]] = None,
) -> Any:
    """Apply functions to the leaves of nested containers.

    ``function`` gets each tensor, ``other`` every other leaf. Returns the same structure, and the
    same object where nothing in it has changed. Subclasses of ``dict`` and OpenMMLab's boxes keep
    their attributes.
    """
    if isinstance(nested, Tensor):
        return function(nested)
    if type(nested) in LEAVES:
        return nested if other is None else other(nested)
    kind: type = type(nested)
    container = container_of(kind)
    if container is None:
        return _replace_in_object(nested, function, other)
    parts = container.parts(nested)
    new = [replace_parts(part, function, other) for part in parts]
    if all(one is another for one, another in zip(parts, new)):
        return nested
    if container is DATACLASS:
        # It may have attributes besides its fields.
        made = copy.copy(nested)
        for name, part in zip(container.names(nested), new):
            object.__setattr__(made, name, part)
        return made
    return container.build(type(nested), container.names(nested), new)


def _replace_in_object(
    value: Any, function: Callable[[Tensor], Tensor], other: Optional[Callable[[Any], object]]
) -> object:
    if isinstance(value, dict):
        new = {key: replace_parts(part, function, other) for key, part in value.items()}
        if all(part is new[key] for key, part in value.items()):
            return value
        made: Any = copy.copy(value)  # a state_dict with its metadata, a ConfigDict
        for key, part in new.items():
            made[key] = part  # outputs of transformers' models have no update()
        return made
    if isinstance(value, list):
        items = [replace_parts(part, function, other) for part in value]
        if all(one is another for one, another in zip(value, items)):
            return value
        made = copy.copy(value)
        made[:] = items
        return made
    if isinstance(getattr(value, 'tensor', None), Tensor):  # boxes of mmdet and mmrotate
        tensor = function(value.tensor)
        if tensor is value.tensor:
            return value
        made = copy.copy(value)
        made.tensor = tensor
        return made
    return value if other is None else other(value)


def tensors_in(nested: object) -> List[Tensor]:
    """The tensors in nested containers, in order."""
    found: List[Tensor] = []
    _collect(nested, found)
    return found


def tensor_bytes(tensor: Tensor) -> int:
    """Size of a tensor's elements; nothing is run, and layouts other than strided count as 0."""
    return tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else 0


def _collect(nested: Any, found: List[Tensor]) -> None:
    kind: type = type(nested)
    if kind is Tensor or isinstance(nested, Tensor):
        found.append(nested)
    elif kind in LEAVES:
        return
    elif isinstance(nested, dict):
        for part in nested.values():
            _collect(part, found)
    elif isinstance(nested, (list, tuple)):
        for part in nested:
            _collect(part, found)
    else:
        container = container_of(kind)
        if container is not None:
            _collect(container.parts(nested), found)
        elif isinstance(getattr(nested, 'tensor', None), Tensor):  # see _replace_in_object
            found.append(nested.tensor)
