"""Find the tensors among the arguments of an operation, and the names of the arguments."""

import inspect
from functools import lru_cache
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple, Union

import torch
from torch import Tensor

#: A tensor's place among the arguments: position or keyword, then indices into nested lists.
Place = Tuple[Union[int, str], ...]


class Found(NamedTuple):
    """A tensor among the arguments of an operation."""

    place: Place
    tensor: Tensor


RECURRENT = ('lstm', 'gru', 'rnn_tanh', 'rnn_relu')

#: Names that PyTorch's own table lacks or has wrong, by the operation's short name.
_NAMES = {
    '__getitem__': ('self', 'index'),
    '__setitem__': ('self', 'index', 'value'),
    'isin': ('elements', 'test_elements'),
    'where': ('condition', 'input', 'other'),
    'Tensor.where': ('self', 'condition', 'other'),
}


def find_tensors(args: Sequence[object], kwargs: Mapping[str, object]) -> List[Found]:
    """List the tensors among the arguments, also in nested lists and tuples."""
    found = [each for i, arg in enumerate(args) for each in _walk((i,), arg)]
    return found + [each for name, arg in kwargs.items() for each in _walk((name,), arg)]


def _walk(place: Place, value: object) -> Iterator[Found]:
    if isinstance(value, Tensor):
        yield Found(place, value)
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _walk((*place, i), part)


def replace_tensors(
    args: Sequence[object], kwargs: Mapping[str, object], new: Mapping[Place, Tensor]
) -> Tuple[Tuple[object, ...], Dict[str, object]]:
    """Copy the arguments with some tensors replaced."""
    return (
        tuple(_rebuild((i,), arg, new) for i, arg in enumerate(args)),
        {name: _rebuild((name,), arg, new) for name, arg in kwargs.items()},
    )


def _rebuild(place: Place, value: object, new: Mapping[Place, Tensor]) -> Any:
    if place in new:
        return new[place]
    if not isinstance(value, (list, tuple)) or not any(key[: len(place)] == place for key in new):
        return value
    parts = [_rebuild((*place, i), part, new) for i, part in enumerate(value)]
    return type(value)(*parts) if hasattr(value, '_fields') else type(value)(parts)


def short_name(func: Callable) -> str:
    """The name of a function without its namespace or overload, e.g. ``'add_'``."""
    return getattr(func, '__name__', '').partition('.')[0]


def operation_name(func: Callable) -> str:
    """The public name of a function, e.g. ``'torch.nn.functional.linear'``."""
    name = torch.overrides.resolve_name(func)
    if name is None:
        name = short_name(func)
        return f'torch.{name}' if hasattr(torch, name) else getattr(func, '__qualname__', name)
    name = name.replace('torch.functional.', 'torch.')
    return name if name.startswith('torch.') else f'torch.ops.{name}'


def roles(func: Callable, places: Sequence[Place]) -> Dict[Place, str]:
    """The names of the arguments at some places, e.g. ``'weight'`` or ``'tensors[1]'``."""
    names, rest = argument_names(func, tuple(place[0] for place in places))
    return {place: _role(place, names, rest) for place in places}


def _role(place: Place, names: Sequence[str], rest: str) -> str:
    first, inner = place[0], place[1:]
    if isinstance(first, str):
        role = first
    elif first < len(names):
        role = names[first]
    else:
        role = f'{rest}[{first - len(names)}]' if rest else f'args[{first}]'
    return role + ''.join(f'[{i}]' for i in inner)


@lru_cache(maxsize=None)
def argument_names(
    func: Callable, tensors_at: Tuple[Union[int, str], ...] = ()
) -> Tuple[Tuple[str, ...], str]:
    """The names of a function's positional arguments, and of its ``*args`` or ``''``.

    ``tensors_at`` are the arguments that hold tensors, to choose among overloads.
    """
    name = short_name(func)
    is_method = getattr(func, '__objclass__', None) is not None
    names = _NAMES.get(f'Tensor.{name}' if is_method else name) or _NAMES.get(name)
    if names is not None:
        return names, ''
    described = torch.overrides.get_testing_overrides().get(func)
    if described is None or name in RECURRENT:
        names = _schema_names(func, name, tensors_at)
        if names:
            return names, ''
    try:
        parameters = inspect.signature(described or func).parameters.values()
    except (TypeError, ValueError):  # Built in, and PyTorch does not describe it.
        return (), ''
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(each.name for each in parameters if each.kind in positional)
    rest = [each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL]
    return names, rest[0] if rest else ''


def _schema_names(func: Callable, name: str, tensors_at: Tuple) -> Tuple[str, ...]:
    """The names in the operator's schema, of the overload with tensors in these places."""
    schema = getattr(func, '_schema', None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    operator = str(func) if hasattr(func, 'overloads') else f'aten.{name}'
    schemas = torch._C._jit_get_schemas_for_operator(operator.replace('.', '::', 1))
    positions = {place for place in tensors_at if isinstance(place, int)}
    for schema in schemas:
        takes = {i for i, each in enumerate(schema.arguments) if 'Tensor' in str(each.type)}
        if positions <= takes:
            return tuple(argument.name for argument in schema.arguments)
    return ()
