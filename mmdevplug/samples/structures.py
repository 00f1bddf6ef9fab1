"""Describe samples without their values: whether they can travel, and how they differ."""

from functools import lru_cache
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np
from torch import Tensor

from mmdevplug.distributed.wire import ARRAY_KINDS, dumps, is_plain
from mmdevplug.errors import SampleError, first_line
from mmdevplug.utils.pytree import DICT, ELEMENT, LEAVES, LIST, TUPLE, Container, container_of

#: What a sample has at its places: the place, what has to agree (None: nothing), and in words.
Structure = Tuple[Tuple[str, object, str], ...]
#: A rank, the index of one of its samples, and the structure of that.
Example = Tuple[int, int, Structure]

#: Levels of nested containers.
MOST_LEVELS = 64
#: What has to agree where a sample has a plain value, and in words.
_PLAIN: Dict[type, Tuple[Optional[str], str]] = {
    **{kind: (kind.__name__, f'a {kind.__name__}') for kind in LEAVES},
    **{kind: ('number', f'a {kind.__name__}') for kind in (bool, int, float, complex)},
    type(None): (None, 'None'),
}


def describe_samples(samples: Sequence[object], allow_pickle: bool = False) -> List[Structure]:
    """Describe each sample.

    Raises:
        SampleError: With the place and the type of what cannot be sent.
    """
    described = []
    for index, sample in enumerate(samples):
        description = _Description(allow_pickle)
        description.add(sample, '', f'sample {index}')
        described.append(tuple([(*key, text) for key, text in description.found.items()]))
    return described


class _Description:
    """What one sample has at each place; the items of a list share one place."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self.found: Dict[Tuple[str, object], str] = {}

    def add(self, value: Any, place: str, path: str, level: int = 0) -> None:
        """Describe the value at a place; ``path`` also has the indices in lists, for errors."""
        kind: type = type(value)
        if kind in _PLAIN:
            category, text = _PLAIN[kind]
            self.found[place, category] = text
        elif isinstance(value, Tensor):
            if not is_plain(value):
                layout = 'quantized' if value.is_quantized else value.layout
                raise SampleError(
                    f'{path} is a tensor without plain memory '
                    f'({"meta" if value.is_meta else layout}); expected a dense one. Call '
                    f'to_dense() or dequantize(), or leave it out.'
                )
            word = f'tensor {str(value.dtype).replace("torch.", "")}'
            self.found[place, word] = f'a {word}'
        elif isinstance(value, (np.str_, np.bytes_)):
            self.found[place, kind.__name__] = f'a scalar {kind.__name__}'
        elif isinstance(value, np.generic) and value.dtype.kind in ARRAY_KINDS:
            self.found[place, 'number'] = f'a scalar {value.dtype.str}'
        elif kind is np.ndarray:
            self._add_array(value, place, path)
        else:
            container = container_of(kind)
            if container is None:
                self._add_object(value, place, path)
            else:
                self._add_container(value, container, place, path, level)

    def _add_array(self, value: np.ndarray, place: str, path: str) -> None:
        if value.dtype.kind not in ARRAY_KINDS:
            raise SampleError(
                f'{path} is an array of dtype {value.dtype}; expected numbers, strings or times. '
                f'Take it apart into arrays of one plain dtype each.'
            )
        word = f'array {value.dtype.str}'
        # Strings of any length are alike.
        category = 'array of strings' if value.dtype.kind in 'SU' else word
        self.found[place, category] = f'a {word}'

    def _add_container(
        self, value: Any, container: Container, place: str, path: str, level: int
    ) -> None:
        if level >= MOST_LEVELS:
            raise SampleError(
                f'{path} is inside more than {MOST_LEVELS} containers; does one contain itself? '
                f'Flatten it.'
            )
        if container is LIST:
            self._add_list(value, place, path, level)
            return
        names = container.names(value)
        if container is DICT and set(map(type, names)) - {str}:
            _check_keys(names, path)
        kind: type = type(value)
        category, text, steps = _describe_parts(kind, names)
        self.found[place, category] = text
        for step, part in zip(steps, container.parts(value)):
            self.add(part, place + step, path + step, level + 1)

    def _add_list(self, value: List[object], place: str, path: str, level: int) -> None:
        kinds = set(map(type, value))
        if kinds <= LEAVES:  # such as token ids
            words = ['a list', *sorted(kind.__name__ for kind in kinds)]
            self.found[place, 'list'] = ' '.join(words)
            for category, word in map(_PLAIN.__getitem__, kinds):
                self.found[f'{place}[...]', category] = word
            return
        self.found[place, 'list'] = 'a list'
        for index, part in enumerate(value):
            self.add(part, f'{place}[...]', f'{path}[{index}]', level + 1)

    def _add_object(self, value: object, place: str, path: str) -> None:
        word = f'{type(value).__module__}.{type(value).__qualname__}'
        if not self._allow_pickle:
            raise SampleError(
                f'{path} is a {word}, which cannot travel as plain data; expected tensors, '
                f'arrays, numbers, str, bytes, None, and dicts, lists, tuples, dataclasses or '
                f'data elements of these. Leave it out, convert it, register its class with '
                f'register_sample_type(), or trust all ranks and pass allow_pickle=True.'
            )
        try:
            dumps(value, trusted=True)
        except Exception as error:  # whatever the object's own code raises
            problem = first_line(error)
            raise SampleError(f'{path} is a {word}, which cannot be pickled: {problem}') from error
        self.found[place, word] = f'a object {word}'


@lru_cache(maxsize=1024)
def _describe_parts(kind: type, names: Tuple[Any, ...]) -> Tuple[object, str, List[str]]:
    """What has to agree in a container, the same in words, and the steps to its parts."""
    text = f'a {kind.__name__}'
    container: Any = container_of(kind)
    if container is TUPLE:
        text = f'a tuple of {len(names)}'
    elif container is DICT:
        text += f' with the keys {list(names)}'
    elif container is ELEMENT:
        text += f' with the fields {[name for _, name in names]}'
    category = (f'{kind.__module__}.{kind.__qualname__}', frozenset(names))
    return category, text, list(map(container.step, names))


def _check_keys(keys: Iterable[object], path: str) -> None:
    for key in keys:
        if type(key) is tuple:
            _check_keys(key, path)
        elif type(key) not in LEAVES:
            raise SampleError(
                f'{path} is a dict with the key {key!r} of type {type(key).__name__}; expected '
                f'str, int, float, bool, bytes, None, or tuples of these.'
            )


def list_examples(rank: int, structures: Sequence[Structure]) -> List[Example]:
    """The first sample of each structure."""
    first: Dict[Structure, int] = {}
    for index, structure in enumerate(structures):
        first.setdefault(structure, index)
    return [(rank, index, structure) for structure, index in first.items()]


def describe_difference(examples: Sequence[Example]) -> Optional[str]:
    """Describe the first difference in structure; None if there is none.

    Numbers of all kinds count as one, None fits everything, and lists may differ in length.
    """
    #: By place, the first sample that has something there but None.
    expected: Dict[str, Tuple[int, int, Dict[object, str]]] = {}
    for rank, index, structure in examples:
        here: Dict[str, Dict[object, str]] = {}
        for place, category, text in structure:
            here.setdefault(place, {})[category] = text
        for place, found in here.items():
            # Inside of None or of an empty list there is nothing to compare with.
            if [*found] == [None]:
                continue
            first_rank, first_index, known = expected.setdefault(place, (rank, index, found))
            other = [text for category, text in found.items() if category not in (None, *known)]
            if not other or None in known:
                continue
            return (
                f'samples differ in structure: sample {index} of rank {rank} has {other[0]} at '
                f'sample{place}, where sample {first_index} of rank {first_rank} has '
                f'{" or ".join(known.values())}. Make the same kind of samples on all ranks, or '
                f'pass same_structure=False if they are to differ.'
            )
    return None
