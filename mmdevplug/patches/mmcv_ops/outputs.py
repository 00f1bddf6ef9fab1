"""Which arguments mmcv's operators write to.

mmcv allocates most results in Python and lets the operator fill them. Nothing tells them from the
other arguments, so those of the operators with a CPU kernel are listed; for any other operator
they are found by comparing arguments before and after.
"""

import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

#: By operator: what it writes to and does not read. mmcv gives it zeros or uninitialized memory.
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
    """The names of an operator's parameters, from the first line that pybind11 documents it with.

    Args:
        function (callable): Of ``mmcv._ext``.

    Returns:
        List[str]: Empty if nothing tells them.
    """
    signature = (function.__doc__ or '').partition('\n')[0].partition('->')[0]
    return re.findall(r'(\w+): ', signature)


def output_ids(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Optional[List[int]]:
    """The identities of the tensors that a call writes to and does not read.

    Args:
        function (callable): Of ``mmcv._ext``.
        args (Sequence): Its arguments.
        kwargs (Mapping): Those by name.

    Returns:
        List[int] or None: None if nobody can tell.
    """
    names = parameter_names(function)
    outputs = OUTPUTS.get(function.__name__)
    if outputs is None or len(names) < len(args):
        return None
    given = {**dict(zip(names, args)), **kwargs}
    return [id(given[name]) for name in outputs if name in given]


class Comparison:
    """Tells which tensors a call has changed.

    Args:
        tensors (Sequence[Tensor]): On the host.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._before = [tensor.clone() for tensor in tensors]

    def changed(self) -> List[int]:
        """The positions of those that are no longer the same, NaN being equal to itself."""
        return [
            position
            for position, (before, after) in enumerate(zip(self._before, self._tensors))
            if not _same(before, after)
        ]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    equal = one == other
    if one.is_floating_point():
        equal |= torch.isnan(one) & torch.isnan(other)
    return bool(equal.all())
