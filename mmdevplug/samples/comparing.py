"""Compare the structure of samples across ranks, and name the first difference."""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from mmdevplug.utils.pytree import DATACLASS, DICT, ELEMENT, LIST, NAMED_TUPLE, TUPLE

from .encode import Structure

#: By the kind of a container, the access to a part.
_STEPS = {
    'OrderedDict': DICT.step,
    **{each.name: each.step for each in (DICT, LIST, TUPLE, NAMED_TUPLE, DATACLASS, ELEMENT)},
}
_NUMBERS = {'bool', 'int', 'float', 'complex', 'scalar'}


class Example(NamedTuple):
    """A sample of a rank, and its structure without the lengths of lists."""

    rank: int
    sample: int
    structure: Structure

    @classmethod
    def of(cls, rank: int, sample: int, structure: Structure) -> 'Example':
        """Create one from a structure as it was sent."""
        return cls(rank, sample, _outline(structure))


def _outline(structure: Structure) -> Structure:
    """A structure in which lists have each structure of their items once."""
    if isinstance(structure, str):
        return structure
    kind, where, names, parts = structure
    if kind == 'pickle':
        return kind
    parts = tuple(map(_outline, parts))
    if kind == 'list':
        parts = tuple(dict.fromkeys(parts))
    return (kind, where, names, parts)


def describe_difference(examples: Sequence[Example]) -> Optional[str]:
    """Describe the first difference in structure; None if there is none.

    Numbers of all kinds count as one, None fits everything, and lists may differ in length.
    """
    first = examples[0] if examples else None
    for example in examples[1:]:
        found = _difference(first.structure, example.structure, '')
        if found is not None:
            place, expected, other = found
            return (
                f'samples differ in structure: sample {example.sample} of rank {example.rank} has '
                f'{other} at sample{place}, where sample {first.sample} of rank {first.rank} has '
                f'{expected}. Make the same kind of samples on all ranks, or pass '
                f'same_structure=False if they are to differ.'
            )
    return None


_Difference = Optional[Tuple[str, str, str]]


def _difference(one: Structure, other: Structure, place: str) -> _Difference:
    if one == other or 'NoneType' in (one, other):
        return None
    if _is_list(one) and _is_list(other):
        return _difference_of_lists(one, other, place)
    if isinstance(one, str) or isinstance(other, str):
        same = _category(one) == _category(other)
        return None if same else (place, _describe(one), _describe(other))
    if one[:2] != other[:2]:
        return place, _describe(one), _describe(other)
    ours, theirs = dict(zip(one[2], one[3])), dict(zip(other[2], other[3]))
    if one[2] and set(ours) != set(theirs) or len(one[3]) != len(other[3]):
        return place, _describe(one), _describe(other)
    if not one[2]:
        ours, theirs = dict(enumerate(one[3])), dict(enumerate(other[3]))
    for name, part in ours.items():
        found = _difference(part, theirs[name], place + _STEPS[one[0]](name))
        if found is not None:
            return found
    return None


def _difference_of_lists(one: Structure, other: Structure, place: str) -> _Difference:
    mine, theirs = _items(one), _items(other)
    for item in theirs:
        found = [_difference(each, item, f'{place}[...]') for each in mine]
        if found and None not in found:
            return found[0]
    return None


def _is_list(structure: Structure) -> bool:
    if isinstance(structure, str):
        return structure.startswith('list ')
    return structure[0] == 'list'


def _items(structure: Structure) -> List[Structure]:
    if isinstance(structure, str):
        return structure.split()[1:]
    return list(structure[3])


def _category(structure: Structure) -> Any:
    """Leaves of one category count as the same structure."""
    if not isinstance(structure, str):
        return structure[:2]
    word, _, rest = structure.partition(' ')
    if word == 'array' and rest.strip('<>|')[0] in 'SU':
        return 'array of strings'  # whatever their length
    if word == 'scalar' and rest in ('str', 'bytes'):
        return structure
    word = word if word == 'scalar' else structure
    return 'number' if word in _NUMBERS else word


def _describe(structure: Structure) -> str:
    if isinstance(structure, str):
        return f'a {structure}' if structure != 'NoneType' else 'None'
    kind, where, names, parts = structure
    name = where.rpartition(':')[2]
    if kind in ('dict', 'OrderedDict', 'data element'):
        keys = [key[-1] if kind == 'data element' else key for key in names]
        return f'a {name or kind} with {"the keys" if not name else "the fields"} {keys}'
    if kind == 'tuple':
        return f'a tuple of {len(parts)}'
    return f'a {name or kind}'
