"""Compare the types in a saved state with those of a state of the same keys."""

from numbers import Number, Real
from typing import Iterator, Mapping, NamedTuple, Tuple

from torch import Tensor


class Maybe(NamedTuple):
    """Marks a value that may also be None."""

    like: object


def differences(found: object, like: object, where: str) -> Iterator[Tuple[str, object, str]]:
    """Yield the places of values of other types, the values, and what is expected there."""
    if isinstance(like, Maybe):
        like = None if found is None else like.like
    if like is None:
        return
    if isinstance(like, Mapping):
        if not isinstance(found, Mapping):
            yield where, found, 'a dict'
            return
        for name in like.keys() & found.keys():
            inner = f'{where}.{name}' if isinstance(name, str) else f'{where}[{name!r}]'
            yield from differences(found[name], like[name], inner.lstrip('.'))
    elif isinstance(like, (list, tuple)):
        if not isinstance(found, (list, tuple)):
            yield where, found, 'a list'
            return
        for number, (one, other) in enumerate(zip(found, like)):
            yield from differences(one, other, f'{where}[{number}]')
    elif not _is_like(found, like):
        kinds = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a text'}
        yield where, found, kinds.get(type(like), f'a {type(like).__name__}')


def _is_like(found: object, like: object) -> bool:
    if type(like) is bool:
        return isinstance(found, bool) or (type(found) is int and found in (0, 1))
    if isinstance(like, (Number, Tensor)) and isinstance(found, Tensor):
        return True
    if isinstance(like, int):
        return isinstance(found, Real) and not isinstance(found, bool) and found % 1 == 0
    if isinstance(like, Number):
        return isinstance(found, Number) and not isinstance(found, bool)
    return isinstance(found, type(like)) or isinstance(like, type(found))
