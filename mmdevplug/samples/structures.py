"""Describe samples without their values.

A structure is a nested tuple that samples of the same kind share. A leaf is a string: ``'float'``,
``'tensor float32'``, ``'list int'``. A container is ``(kind, class, names, structures of its
parts)``.
"""

from collections import OrderedDict
from typing import Any, List, Sequence, Tuple, Union

from mmdevplug.utils.pytree import DICT, Container, Names

Structure = Union[str, Tuple]

#: Levels of nested containers.
MOST_LEVELS = 64
#: The kinds of NumPy's dtypes that are plain bytes: numbers, texts and times.
ARRAY_KINDS = 'biufcSUmM'
#: Tensors from this size on are large: two copies of them take longer than another message.
LARGE_BYTES = 256 << 10
#: Types whose values are all sent as they are. An ``int`` may have too many bits.
PLAIN = {type(None): 'None', bool: 'bool', float: 'float', str: 'str', bytes: 'bytes'}
_BUILT_IN = {dict: 'dict', OrderedDict: 'OrderedDict', list: 'list', tuple: 'tuple'}


class Unencodable(Exception):
    """A value cannot be sent; carries the steps to it, the innermost first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.steps: List[str] = []


def describe_container(
    kind: type, container: Container, names: Names, parts: Sequence[Structure]
) -> Structure:
    """Describe a container of a type by the names and the structures of its parts."""
    if container is DICT:
        if not all(type(key) is str for key in names):
            names = tuple(_describe_key(key) for key in names)
    elif kind in _BUILT_IN:
        names = ()
    builtin = _BUILT_IN.get(kind)
    where = '' if builtin else f'{kind.__module__}:{kind.__qualname__}'
    return (builtin or container.name, where, names, tuple(parts))


def _describe_key(key: Any) -> Any:
    kind = type(key)
    if kind is str:
        return key
    # With the type, because 1, 1.0 and True are equal.
    if kind is int and is_big(key):
        return ('big int', str(key))
    if kind is int or kind in PLAIN:
        return (PLAIN.get(kind, 'int'), key)
    if kind is tuple:
        return ('tuple', tuple(_describe_key(part) for part in key))
    raise Unencodable(
        f'a dict with the key {key!r} of type {kind.__name__}; expected str, int, float, bool, '
        f'bytes, None, or tuples of these.'
    )


def is_big(value: int) -> bool:
    """Whether an ``int`` needs more than 64 bits."""
    return not -(2**63) <= value < 2**63
