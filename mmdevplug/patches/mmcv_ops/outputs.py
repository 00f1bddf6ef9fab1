"""Know which arguments mmcv's operators write to.

mmcv allocates most results in Python and passes them to the operator like any other argument.
Those of operators with a CPU kernel are listed; for any other operator, arguments are compared
before and after the call.
"""

import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

#: The arguments that an operator writes to and does not read.
OUTPUTS: Dict[str, Tuple[str, ...]] = dict(
    active_rotated_filter_forward=('output',),
    active_rotated_filter_backward=('grad_in',),
    bbox_overlaps=('ious',),
    bezier_align_forward=('output',),
    bezier_align_backward=('grad_input',),
    box_iou_quadri=('ious',),
    box_iou_rotated=('ious',),
    contour_expand=(),
    deform_conv_forward=('output',),
    deform_conv_backward_input=('gradInput', 'gradOffset'),
    deform_conv_backward_parameters=('gradWeight',),
    dynamic_voxelize_forward=('coors',),
    hard_voxelize_forward=('voxels', 'coors', 'num_points_per_voxel', 'voxel_num'),
    modulated_deform_conv_forward=('output',),
    modulated_deform_conv_backward=(
        'grad_input',
        'grad_weight',
        'grad_bias',
        'grad_offset',
        'grad_mask',
    ),
    nms=(),
    nms_match=(),
    nms_quadri=(),
    nms_rotated=(),
    pixel_group=(),
    points_in_boxes_cpu_forward=('pts_indices_tensor',),
    psamask_forward=('output',),
    psamask_backward=('grad_input',),
    roi_align_forward=('output', 'argmax_y', 'argmax_x'),
    roi_align_backward=('grad_input',),
    roi_align_rotated_forward=('output',),
    # mmcv's names of its parameters are shifted by one.
    roi_align_rotated_backward=('grad_output',),
    rotated_feature_align_forward=('output',),
    rotated_feature_align_backward=('bottom_grad',),
    softnms=('dets',),
)


def parameter_names(function: Callable) -> List[str]:
    """The names of an operator's parameters, from pybind11's docstring; empty if there is none."""
    signature = (function.__doc__ or '').partition('\n')[0].partition('->')[0]
    return re.findall(r'(\w+): ', signature)


def output_ids(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
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
