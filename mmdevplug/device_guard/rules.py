"""Know which operands must be on one device, and which PyTorch accepts on another.

Operations are known by name, because each is a method, a function, an operator and an overload.
"""

from numbers import Integral
from typing import Callable, FrozenSet, List, Mapping, NamedTuple, Sequence, Set

import torch
from torch import Tensor

from mmdevplug.accelerators.detection import DETECTION_ORDER
from mmdevplug.registry import ACCELERATORS

from .operands import RECURRENT, Found, argument_names


def _words(text: str) -> FrozenSet[str]:
    return frozenset(text.split())


#: They copy between devices, use shapes or types only, or read numbers as Python does.
TAKE_SEVERAL = _words(
    """
    __get__ __set__ __delete__ __deepcopy__ __reduce_ex__ __setstate__ __len__ __format__
    to _to_copy copy copy_ _copy_from _copy_from_and_resize _foreach_copy _foreach_copy_ _to_cpu
    type type_as set_ set_data fill_ new new_tensor new_empty new_zeros new_ones new_full
    new_empty_strided view_as expand_as reshape_as resize_as_ resize_as_sparse_ is_same_size
    is_set_to result_type can_cast promote_types _has_compatible_shallow_copy_type module_load
    broadcast_tensors atleast_1d atleast_2d atleast_3d pad_sequence tensor as_tensor asarray
    zeros ones full empty arange linspace logspace range eye randint zeros_like full_like
    view reshape expand narrow select split chunk split_with_sizes unsafe_split unflatten repeat
    tile permute roll squeeze unsqueeze flatten pad interpolate upsample
    backward grad register_hook is_nonzero _use_cudnn_ctc_loss
    """
)

#: Operations on lists, item by item.
LISTWISE = ('_foreach_', '_fused_', '_amp_foreach_')

#: Here numbers must be on the device of the others, too.
REFUSE_NUMBERS = _words(
    """
    stack cat concat concatenate hstack vstack dstack column_stack row_stack block_diag meshgrid
    cartesian_prod einsum embedding embedding_bag index_select index_add index_add_ index_copy
    index_copy_ gather take take_along_dim scatter scatter_ scatter_add scatter_add_ put put_
    linear conv1d conv2d conv3d cross_entropy nll_loss cdist isin equal searchsorted bucketize
    """
)

#: Here torch_xla takes no numbers on the CPU.
LAZY_REFUSES_NUMBERS = _words('where lerp lerp_ clamp clamp_ clip clip_ clamp_min clamp_max')

#: Here PyTorch takes indices on the CPU for a tensor on any device.
INDEXING = _words('__getitem__ __setitem__ index index_put index_put_ _index_put_impl_')

#: Arguments that may or must be on the CPU.
ON_HOST: Mapping[str, FrozenSet[str]] = {
    **dict.fromkeys((*RECURRENT, '_pad_packed_sequence'), _words('batch_sizes')),
    '_pack_padded_sequence': _words('lengths'),
    'ctc_loss': _words('targets input_lengths target_lengths'),
    'tensor_split': _words('indices_or_sections tensor_indices_or_sections'),
}

#: Arguments that are written to by operations without ``_`` at the end of their name.
_WRITTEN: Mapping[str, FrozenSet[str]] = dict.fromkeys(
    ('batch_norm', 'instance_norm', 'native_batch_norm'), _words('running_mean running_var')
)

_NOT_IN_PLACE = _words('__int__ __index__ __invert__ __iter__')


class Call(NamedTuple):
    """An operation about to run."""

    func: Callable
    name: str
    args: Sequence[object]
    kwargs: Mapping[str, object]
    found: List[Found]

    def argument(self, each: Found) -> str:
        """The name of the argument that is or holds a tensor."""
        place = each.place[0]
        if isinstance(place, str):
            return place
        tensors_at = tuple(other.place[0] for other in self.found)
        names, _ = argument_names(self.func, tensors_at)
        return names[place] if place < len(names) else ''


def lazy_types() -> Set[str]:
    """The device types of lazy accelerators, e.g. ``{'xla'}``."""
    found = set()
    for name in dict.fromkeys((*DETECTION_ORDER, *ACCELERATORS.module_dict)):
        family = ACCELERATORS.module_dict[name]
        # A cached property of a class; a function that chooses among families has none.
        compilation = getattr(family, 'compilation', None)
        if getattr(getattr(compilation, 'func', compilation), 'lazy', False):
            found.add(family.device_type)
    return found


def takes_several(call: Call) -> bool:
    """Whether an operation takes operands on several devices."""
    return call.name in TAKE_SEVERAL or (call.name == '__setitem__' and _copies(call.args[1]))


def _copies(index: object) -> bool:
    """Whether assigning to ``x[index]`` is a copy, which may cross devices."""
    return all(
        part is None
        or part is Ellipsis
        or isinstance(part, slice)
        or (isinstance(part, Integral) and not isinstance(part, bool))
        or (isinstance(part, Tensor) and _is_read_as_number(part, torch.bool, torch.uint8))
        for part in (index if isinstance(index, tuple) else (index,))
    )


def _is_read_as_number(index: Tensor, *but: torch.dtype) -> bool:
    """Whether an index is read as a Python number: a single integer."""
    if index.dim() or index.is_floating_point() or index.is_complex():
        return False
    return index.dtype not in but


def operand_groups(call: Call) -> List[List[Found]]:
    """Group the operands that must be on one device; others are in no group."""
    bound = []
    for each in call.found:
        if each.tensor.device.type == 'cpu' and each.tensor.dim() == 0:
            lazy = _has_lazy(call.found)
            refused = call.name in REFUSE_NUMBERS or (lazy and call.name in LAZY_REFUSES_NUMBERS)
            if not refused and not is_written(call, each):
                continue
        if not _is_free(call, each):
            bound.append(each)
    return _partners(bound) if call.name.startswith(LISTWISE) else [bound]


def _has_lazy(found: Sequence[Found]) -> bool:
    lazy = lazy_types()
    return any(each.tensor.device.type in lazy for each in found)


def _is_free(call: Call, each: Found) -> bool:
    """Whether PyTorch takes this operand on another device because of its role."""
    tensor, on_host = each.tensor, each.tensor.device.type == 'cpu'
    if call.name in INDEXING:
        if each.place[0] == 1:
            indexed = next((one for one in call.found if one.place == (0,)), call.found[0])
            return (on_host and indexed.tensor.device.type != 'cpu') or _is_read_as_number(tensor)
        # PyTorch copies a single value to the device, but torch_xla does not.
        if each.place[0] == 2 and tensor.dim() == 0:
            return not _has_lazy(call.found)
        return False
    return on_host and call.name in ON_HOST and call.argument(each) in ON_HOST[call.name]


def _partners(found: Sequence[Found]) -> List[List[Found]]:
    """Group the first items of all lists, the second items, …, with all tensors in no list."""
    single = [each for each in found if len(each.place) == 1]
    rows: dict = {}
    for each in found:
        if len(each.place) > 1:
            rows.setdefault(each.place[1], []).append(each)
    return [row + single for row in rows.values()] or [single]


def is_written(call: Call, each: Found) -> bool:
    """Whether an operation writes to this operand, so that it cannot be copied."""
    place = each.place[0]
    schema = getattr(call.func, '_schema', None)
    if schema is not None:
        aliases = {
            key: argument.alias_info
            for i, argument in enumerate(schema.arguments)
            for key in (i, argument.name)
        }
        return aliases.get(place) is not None and aliases[place].is_write
    if place == 'out':
        return True
    if call.name.startswith('_fused_'):
        return len(each.place) > 1
    if _is_in_place(call.name):
        return place in (0, 'self', 'input')
    if call.name in ('embedding', 'embedding_bag'):
        names, _ = argument_names(call.func)
        given = dict(zip(names, call.args), **call.kwargs)
        return call.argument(each) == 'weight' and given.get('max_norm') is not None
    return call.name in _WRITTEN and call.argument(each) in _WRITTEN[call.name]


def _is_in_place(name: str) -> bool:
    if name.endswith('__'):
        in_place = name.startswith('__i') and name not in _NOT_IN_PLACE
        return in_place or name == '__setitem__'
    return name.endswith('_')
