"""Run one operator on the host, with one copy of all its tensors in each direction.

mmcv allocates most results in Python and passes them to the operator like any other argument.
Those of operators with a CPU kernel are listed; for any other operator, arguments are compared
before and after the call.
"""

import re
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mmdevplug.accelerators import to_device
from mmdevplug.accelerators.move_nested import accelerator_for
from mmdevplug.utils.pytree import replace_parts

#: mmcv has few CPU kernels for these; they are computed in float32.
REDUCED = (torch.float16, torch.bfloat16)


@torch.no_grad()
def call_on_host(
    function: Callable, args: Sequence[object], kwargs: Dict[str, object], device: torch.device
) -> Any:
    """Call an operator with host copies of its tensors on a device.

    Tensors that the operator writes to are updated on the device; those that it only writes to
    are not fetched. Tensors that are on the host already are passed as they are; if the device is
    the host itself, those of half precision are computed in float32.
    """
    accelerator = accelerator_for(device.type)
    tensors = [each for each in [*args, *kwargs.values()] if isinstance(each, Tensor)]
    if device.type == 'cpu':
        there = {id(tensor): tensor for tensor in tensors if is_reduced(tensor)}
    else:
        there = {id(tensor): tensor for tensor in tensors if tensor.device == device}
    outputs = output_ids(function, args, kwargs)
    read = [tensor for key, tensor in there.items() if key not in (outputs or ())]
    # Everything, not only what these tensors need: the rest would be computed again later.
    accelerator.compilation.materialize(device, read)
    fetched = accelerator.copies.to_host(read)
    host = {id(tensor): _widened(copy) for tensor, copy in zip(read, fetched)}
    for key in set(there) - set(host):
        host[key] = _widened(torch.zeros(there[key].shape, dtype=there[key].dtype))
    before = {key: tensor.clone() for key, tensor in host.items()} if outputs is None else {}

    def on_host(value: object) -> object:
        return host.get(id(value), value)

    result = function(
        *[on_host(value) for value in args],
        **{name: on_host(value) for name, value in kwargs.items()},
    )
    if outputs is None:
        written = [key for key in host if has_changed(before[key], host[key])]
    else:
        written = [key for key in outputs if key in there]
    accelerator.copies.into_device([host[key] for key in written], [there[key] for key in written])
    return to_device(_narrowed(result, list(there.values())), device)


@contextmanager
def contiguous(
    function: Callable, args: Sequence[object], kwargs: Dict[str, object]
) -> Iterator[Tuple[Sequence[object], Dict[str, object]]]:
    """Give an operator contiguous copies in place of other tensors, and copy back what it writes.

    A vision transformer gives its neck tensors in channels_last without being asked to.
    """
    others = [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, Tensor) and not value.is_contiguous()
    ]
    if not others:
        yield args, kwargs
        return
    copies = {id(value): value.detach().contiguous() for value in others}
    outputs = output_ids(function, args, kwargs)
    before = {} if outputs is not None else {key: each.clone() for key, each in copies.items()}
    yield (
        [copies.get(id(value), value) for value in args],
        {name: copies.get(id(value), value) for name, value in kwargs.items()},
    )
    with torch.no_grad():
        for value in others:
            key = id(value)
            if key in outputs if outputs is not None else has_changed(before[key], copies[key]):
                value.copy_(copies[key])


def is_reduced(value: object) -> bool:
    """Whether a value is a tensor of half precision."""
    return isinstance(value, Tensor) and value.dtype in REDUCED


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if is_reduced(tensor) else tensor


def _narrowed(result: object, tensors: List[Tensor]) -> object:
    """Convert the result of an operator to the precision of its arguments."""
    reduced = [tensor.dtype for tensor in tensors if is_reduced(tensor)]
    if not reduced:
        return result
    return replace_parts(result, lambda t: t.to(reduced[0]) if t.is_floating_point() else t)


#: The arguments that an operator writes to and does not read.
OUTPUTS: Dict[str, Tuple[str, ...]] = {
    **dict.fromkeys(('contour_expand', 'nms', 'nms_match', 'nms_quadri', 'nms_rotated'), ()),
    'pixel_group': (),
    **dict.fromkeys(('bbox_overlaps', 'box_iou_quadri', 'box_iou_rotated'), ('ious',)),
    **dict.fromkeys(('active_rotated_filter_forward', 'bezier_align_forward'), ('output',)),
    **dict.fromkeys(('deform_conv_forward', 'modulated_deform_conv_forward'), ('output',)),
    **dict.fromkeys(('psamask_forward', 'roi_align_rotated_forward'), ('output',)),
    'rotated_feature_align_forward': ('output',),
    **dict.fromkeys(('bezier_align_backward', 'psamask_backward'), ('grad_input',)),
    'roi_align_forward': ('output', 'argmax_y', 'argmax_x'),
    'roi_align_backward': ('grad_input',),
    # mmcv's names of its parameters are shifted by one.
    'roi_align_rotated_backward': ('grad_output',),
    'rotated_feature_align_backward': ('bottom_grad',),
    'active_rotated_filter_backward': ('grad_in',),
    'deform_conv_backward_input': ('gradInput', 'gradOffset'),
    'deform_conv_backward_parameters': ('gradWeight',),
    'modulated_deform_conv_backward': tuple(
        f'grad_{name}' for name in ('input', 'weight', 'bias', 'offset', 'mask')
    ),
    'dynamic_voxelize_forward': ('coors',),
    'hard_voxelize_forward': ('voxels', 'coors', 'num_points_per_voxel', 'voxel_num'),
    'points_in_boxes_cpu_forward': ('pts_indices_tensor',),
    'softnms': ('dets',),
}


def parameter_names(function: Callable) -> List[str]:
    """The names of an operator's parameters, from pybind11's docstring; empty if there is none."""
    signature = (function.__doc__ or '').partition('\n')[0].partition('->')[0]
    return re.findall(r'(\w+): ', signature)


def output_ids(
    function: Callable, args: Sequence[object], kwargs: Mapping[str, object]
) -> Optional[List[int]]:
    """The ``id()`` of tensors that a call writes to and does not read; None if unknown."""
    names = parameter_names(function)
    outputs = OUTPUTS.get(function.__name__)
    if outputs is None or len(names) < len(args):
        return None
    given = {**dict(zip(names, args)), **kwargs}
    return [id(given[name]) for name in outputs if name in given]


def has_changed(before: Tensor, after: Tensor) -> bool:
    """Whether two host tensors differ, where NaN equals NaN."""
    if before.shape != after.shape:
        return True
    equal = before == after
    if before.is_floating_point():
        equal |= torch.isnan(before) & torch.isnan(after)
    return not equal.all()
