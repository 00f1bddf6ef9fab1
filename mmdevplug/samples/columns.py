"""Flatten samples into columns, and build them again on another rank.

A structure describes samples without their values. It is a nested tuple: a leaf is a string, such
as ``'float'``, ``'tensor float32'`` or ``'list int'``; a container is ``(class, names, structures
of its parts)``. Samples of one structure and one set of shapes are a group, and each leaf of the
group is a column: no Python object is made for a sample.
"""

from itertools import chain, repeat
from operator import attrgetter
from typing import (
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np
import torch
from torch import Tensor

from mmdevplug.accelerators.move_nested import move_tensors
from mmdevplug.distributed.wire import (
    ARRAY_KINDS,
    CPU,
    Block,
    Kind,
    dumps,
    is_plain,
    loads,
    refused,
)
from mmdevplug.errors import SampleError, first_line
from mmdevplug.utils.pytree import (
    DATACLASS,
    DICT,
    ELEMENT,
    LEAVES,
    LIST,
    NAMED_TUPLE,
    TUPLE,
    Container,
    container_of,
)

Structure = Union[str, Tuple]

#: Levels of nested containers.
MOST_LEVELS = 64
_attributes = attrgetter('dtype', 'shape', 'layout', 'is_meta')
#: The first words of leaves, and the types of their values where these are checked.
_WORDS = {
    **{kind.__name__: object for kind in LEAVES},
    'list': list,
    'array': np.ndarray,
    'scalar': np.generic,
    'tensor': Tensor,
    'object': object,
}


class Group(NamedTuple):
    """Samples of one structure."""

    structure: Structure
    rows: Sequence[int]  # the indices of the samples, ascending
    leaves: List[Any]  # of each leaf a block, or a list with a value for each sample

    @property
    def shapes(self) -> Tuple:
        """The shapes of the tensors of a sample."""
        return tuple([leaf.shape for leaf in self.leaves if isinstance(leaf, Block)])


class _NotUniform(Exception):
    """Samples differ in structure or shape."""


class _Unsendable(Exception):
    """A value cannot be sent; carries the steps to it, the innermost first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.steps: List[str] = []


def flatten_samples(samples: Sequence[Any], allow_pickle: bool = False) -> List[Group]:
    """Flatten samples into a group for each structure and set of shapes.

    Raises:
        SampleError: With the place and the type of what cannot be sent.
    """
    if not samples:
        return []
    try:
        return [_flatten(samples, range(len(samples)), allow_pickle)]
    except (_NotUniform, _Unsendable):
        groups: Dict[str, Group] = {}
    for index, sample in enumerate(samples):
        try:
            group = _flatten([sample], [index], allow_pickle)
        except _Unsendable as error:
            place = ''.join(reversed(error.steps))
            raise SampleError(f'sample {index}{place} is {error}') from error
        # As text, because 1, 1.0 and True are equal.
        known = groups.setdefault(repr((group.structure, group.shapes)), group)
        if known is not group:
            known.rows.append(index)
            for leaf, more in zip(known.leaves, group.leaves):
                if isinstance(leaf, Block):
                    leaf, more = leaf.tensors, more.tensors
                leaf.extend(more)
    return list(groups.values())


def _flatten(samples: Sequence[Any], rows: Sequence[int], allow_pickle: bool) -> Group:
    columns = _Columns(allow_pickle)
    return Group(columns.describe(samples, 0), rows, columns.leaves)


class _Columns:
    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self.leaves: List[Any] = []

    def describe(self, column: Sequence[Any], level: int) -> Structure:
        """Describe a value of each sample, and add its leaves."""
        kinds = set(map(type, column))
        if all(issubclass(kind, Tensor) for kind in kinds):
            return self._describe_tensors(column)
        kind = kinds.pop()
        if kinds:
            raise _NotUniform
        word: Optional[str] = None
        if kind in LEAVES:
            word = kind.__name__
        elif kind is list:
            word = _only(map(_word_of_list, column))
        elif issubclass(kind, np.generic) or kind is np.ndarray:
            word = _only(map(_word_of_array, column))
        if word is not None:
            self.leaves.append(list(column))
            return word
        container = container_of(kind)
        if container is None:
            return self._describe_others(column, kind)
        return self._describe_containers(column, kind, container, level)

    def _describe_tensors(self, column: Sequence[Tensor]) -> str:
        first = column[0]
        if not is_plain(first):
            kind = 'quantized' if first.is_quantized else 'meta' if first.is_meta else first.layout
            raise _Unsendable(
                f'a tensor without plain memory ({kind}); expected a dense one. Call to_dense() '
                f'or dequantize(), or leave it out.'
            )
        _only(map(_attributes, column))
        tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in column]
        self.leaves.append(Block(first.dtype, tuple(first.shape), tensors))
        return f'tensor {str(first.dtype).replace("torch.", "")}'

    def _describe_containers(
        self, column: Sequence[Any], kind: type, container: Container, level: int
    ) -> Structure:
        if level >= MOST_LEVELS:
            raise _Unsendable(
                f'inside more than {MOST_LEVELS} containers; does one contain itself? Flatten it.'
            )
        names = container.names(column[0])
        if container is DICT:
            keys = list(chain.from_iterable(column))
            if set(map(type, keys)) - {str}:
                _check_keys(keys)
                if len(column) > 1:  # 1, 1.0 and True are equal
                    raise _NotUniform
            elif keys != list(names) * len(column):
                raise _NotUniform
        elif container in (LIST, TUPLE):
            _only(map(len, column))
        elif container is ELEMENT:
            _only(map(container.names, column))
        parts = []
        for name in names:
            try:
                part = list(map(container.part, column, repeat(name)))
                parts.append(self.describe(part, level + 1))
            except _Unsendable as error:
                error.steps.append(container.step(name))
                raise
        described = () if container in (LIST, TUPLE) else names
        return (kind, described, tuple(parts))

    def _describe_others(self, column: Sequence[Any], kind: type) -> Structure:
        name = f'{kind.__module__}.{kind.__qualname__}'
        if not self._allow_pickle:
            raise _Unsendable(
                f'a {name}, which cannot travel as plain data; expected tensors, arrays, numbers, '
                f'str, bytes, None, and dicts, lists, tuples, dataclasses or data elements of '
                f'these. Leave it out, convert it, register its class with '
                f'register_sample_type(), or trust all ranks and pass allow_pickle=True.'
            )
        try:
            dumps(list(column))
        except Exception as error:  # whatever the object's own code raises
            raise _Unsendable(f'a {name}, which cannot be pickled: {first_line(error)}') from error
        self.leaves.append(list(column))
        return f'object {name}'


def _only(found: Any) -> Any:
    """The value that all samples have."""
    values = set(found)
    if len(values) > 1:
        raise _NotUniform
    return values.pop()


def _word_of_list(value: List[Any]) -> Optional[str]:
    """The leaf that a list of plain values is, whatever its length; None for another list."""
    kinds = set(map(type, value))
    plain = kinds and kinds <= LEAVES
    return 'list ' + ' '.join(sorted(kind.__name__ for kind in kinds)) if plain else None


def _word_of_array(value: Any) -> Optional[str]:
    """The leaf that an array or scalar of NumPy is; None for a scalar that is an object."""
    if isinstance(value, (np.str_, np.bytes_)):
        return f'scalar {value.dtype.type.__name__}'  # whatever its length
    if type(value) is np.ndarray:
        if value.dtype.kind not in ARRAY_KINDS:
            raise _Unsendable(
                f'an array of dtype {value.dtype}; expected numbers, strings or times. Take it '
                f'apart into arrays of one plain dtype each.'
            )
        return f'array {value.dtype.str}'
    return f'scalar {value.dtype.str}' if value.dtype.kind in ARRAY_KINDS else None


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        if type(key) is tuple:
            _check_keys(key)
        elif type(key) not in LEAVES:
            raise _Unsendable(
                f'a dict with the key {key!r} of type {type(key).__name__}; expected str, int, '
                f'float, bool, bytes, None, or tuples of these.'
            )


# between ranks -----------------------------------------------------------------------------------


def write_groups(groups: Sequence[Group]) -> Tensor:
    """Write groups, whose tensors are on the host, for other ranks."""
    return dumps([(structure, list(rows), leaves) for structure, rows, leaves in groups])


def read_groups(
    message: Tensor, device: torch.device = CPU, allow_pickle: bool = False
) -> Union[str, List[Group]]:
    """Read groups, or the text of an error, that another rank wrote.

    Blocks are views of the message; tensors of pickled objects are on the device.

    Raises:
        SampleError: If the message is not valid.
    """
    content = loads(message, device, allow_pickle)
    if isinstance(content, str):
        return content
    with refused():
        groups = [Group(read_structure(s), rows, leaves) for s, rows, leaves in content]
        for group in groups:
            lengths = {len(leaf.tensors if isinstance(leaf, Block) else leaf) for leaf in group[2]}
            if lengths - {len(group.rows)}:
                raise ValueError(f'columns of {lengths} values for {len(group.rows)} samples')
        found = sorted(row for group in groups for row in group.rows)
        if found != list(range(len(found))):
            raise ValueError('the numbers of samples are not those of all samples')
    return groups


def read_structure(structure: Any, level: int = 0) -> Structure:
    """Check a structure that another rank sent."""
    if isinstance(structure, str):
        return structure
    kind, names, parts = structure
    kind = kind.kind if isinstance(kind, Kind) else kind
    container = container_of(kind)
    if container in (NAMED_TUPLE, DATACLASS):
        expected = tuple(kind._fields if container is NAMED_TUPLE else kind.__dataclass_fields__)
        if names != expected:
            raise SampleError(
                f'a rank sent a {kind.__qualname__} with the fields {list(names)}, which here has '
                f'{list(expected)}. Run the same code on all ranks.'
            )
    if container is None or level > MOST_LEVELS:
        raise ValueError(f'the container {kind!r} in level {level}')
    if container not in (LIST, TUPLE) and len(dict.fromkeys(names)) != len(parts):
        raise ValueError(f'{len(parts)} parts for the names {names!r:.80}')
    return (kind, tuple(names), tuple([read_structure(part, level + 1) for part in parts]))


def unflatten_samples(groups: Sequence[Group], device: torch.device) -> List[Any]:
    """Rebuild received samples; all tensors are copied to a device in one call."""
    views = [
        tensor
        for group in groups
        for leaf in group.leaves
        if isinstance(leaf, Block)
        for tensor in leaf.tensors.unbind()
    ]
    # A view would keep the whole buffer in memory.
    moved = iter(
        [
            tensor.clone() if tensor is view else tensor
            for view, tensor in zip(views, move_tensors(views, device))
        ]
    )
    samples: List[Any] = [None] * sum(len(group.rows) for group in groups)
    for structure, rows, leaves in groups:
        columns = [
            [next(moved) for _ in rows] if isinstance(leaf, Block) else leaf for leaf in leaves
        ]
        for row, sample in zip(rows, build(structure, columns, len(rows))):
            samples[row] = sample
    return samples


def build(structure: Structure, columns: Sequence[List[Any]], rows: int) -> List[Any]:
    """Build a value for each row from the columns of all leaves."""
    leaves = iter(columns)
    with refused():
        built = _build(structure, leaves, rows)
        if next(leaves, None) is not None:
            raise ValueError('more columns than leaves')
    return built


def _build(structure: Structure, leaves: Iterator[List[Any]], rows: int) -> List[Any]:
    if isinstance(structure, str):
        column = next(leaves, None)
        kind = _WORDS.get(structure.partition(' ')[0], ())
        if column is None or not all(issubclass(each, kind) for each in set(map(type, column))):
            raise ValueError(f'no column of the type {structure!r}')
        return column
    kind, names, parts = structure
    columns = [_build(part, leaves, rows) for part in parts]
    values = zip(*columns) if columns else [()] * rows
    return [container_of(kind).build(kind, names, each) for each in values]
