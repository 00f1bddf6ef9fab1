"""One call of each of mmcv's operators that has a kernel for the CPU, and how to compare them.

A case gets what makes tensors on a device, and returns what the operator gives. Tensors that are
made with ``grad=True`` get a gradient, which is compared too.
"""

from importlib import import_module

import torch

#: By name of the case: a function of a :class:`Tensors`.
CASES = {}


def case(function):
    """Add a case, which gets the module of mmcv's operators, too."""
    CASES[function.__name__] = lambda tensors: function(tensors, import_module('mmcv.ops'))
    return function


class Tensors:
    """Makes the same tensors on any device, and keeps those that are to have a gradient.

    Args:
        device (str): Where they go.
        dtype (torch.dtype): Of those that are not whole numbers.
    """

    def __init__(self, device, dtype=torch.float32):
        self.device = device
        self.dtype = dtype
        self.leaves = []
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape, grad=False):
        return self.put(torch.randn(*shape, generator=self._generator), grad)

    def uniform(self, *shape, grad=False):
        return self.put(torch.rand(*shape, generator=self._generator), grad)

    def whole(self, below, *shape, dtype=torch.int64):
        numbers = torch.randint(0, below, shape, generator=self._generator)
        return self.put(numbers.to(dtype))

    def put(self, tensor, grad=False):
        tensor = tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
        if grad:
            self.leaves.append(tensor.detach().requires_grad_())
            return self.leaves[-1]
        return tensor

    def corners(self, number, size=20.0):
        """Boxes (x1, y1, x2, y2)."""
        start = torch.rand(number, 2, generator=self._generator) * size
        extent = torch.rand(number, 2, generator=self._generator) * size + 1
        return self.put(torch.cat([start, start + extent], 1))

    def turned(self, number):
        """Boxes (x, y, width, height, angle)."""
        numbers = torch.rand(number, 5, generator=self._generator)
        return self.put(numbers * torch.tensor([20, 20, 10, 10, 3.0]) + 1)

    def rois(self, number):
        """Boxes of the first picture."""
        boxes = self.corners(number).cpu()
        return self.put(torch.cat([torch.zeros(number, 1), boxes], 1))


@case
def nms(t, ops):
    return ops.nms(t.corners(30), t.uniform(30), 0.4)


@case
def nms_above_a_score(t, ops):
    return ops.nms(t.corners(30), t.uniform(30), 0.4, score_threshold=0.3, max_num=5)


@case
def batched_nms(t, ops):
    cfg = dict(type='nms', iou_threshold=0.4)
    return ops.batched_nms(t.corners(30), t.uniform(30), t.whole(3, 30), cfg)


@case
def soft_nms(t, ops):
    return ops.soft_nms(t.corners(30), t.uniform(30), 0.4)


@case
def nms_match(t, ops):
    dets = torch.cat([t.corners(30), t.uniform(30, 1)], 1)
    return tuple(ops.nms_match(dets, 0.4))


@case
def nms_rotated(t, ops):
    return ops.nms_rotated(t.turned(20), t.uniform(20), 0.3)


@case
def nms_quadri(t, ops):
    x1, y1, x2, y2 = t.corners(20).unbind(1)
    boxes = torch.stack([x1, y1, x2, y1, x2, y2, x1, y2], 1)
    return ops.nms_quadri(boxes, t.uniform(20), 0.3)


@case
def roi_align(t, ops):
    return ops.RoIAlign(3, 1.0, 2)(t.normal(1, 4, 20, 20, grad=True), t.rois(10))


@case
def roi_align_max(t, ops):
    layer = ops.RoIAlign((3, 2), 0.5, 0, pool_mode='max')
    return layer(t.normal(1, 4, 20, 20, grad=True), t.rois(10))


@case
def roi_align_rotated(t, ops):
    rois = torch.cat([t.put(torch.zeros(8, 1)), t.turned(8)], 1)
    return ops.RoIAlignRotated(3, 1.0, 2)(t.normal(1, 4, 20, 20, grad=True), rois)


@case
def deform_conv2d(t, ops):
    image, offset = t.normal(2, 4, 8, 8, grad=True), t.normal(2, 36, 8, 8, grad=True)
    return ops.deform_conv2d(image, offset, t.normal(6, 2, 3, 3, grad=True), 1, 1, 1, 2, 2)


@case
def deform_conv2d_in_steps(t, ops):
    image, offset = t.normal(4, 2, 6, 6, grad=True), t.normal(4, 18, 6, 6, grad=True)
    weight = t.normal(3, 2, 3, 3, grad=True)
    return ops.deform_conv2d(image, offset, weight, 1, 1, 1, 1, 1, False, 2)


@case
def modulated_deform_conv2d(t, ops):
    image, offset = t.normal(2, 4, 8, 8, grad=True), t.normal(2, 18, 8, 8, grad=True)
    mask, weight = t.uniform(2, 9, 8, 8, grad=True), t.normal(5, 4, 3, 3, grad=True)
    return ops.modulated_deform_conv2d(
        image, offset, mask, weight, t.normal(5, grad=True), 1, 1, 1, 1, 1
    )


@case
def bbox_overlaps(t, ops):
    one, other = t.corners(6), t.corners(6)
    return ops.bbox_overlaps(one, other), ops.bbox_overlaps(one, other, 'iof', aligned=True)


@case
def box_iou_rotated(t, ops):
    return ops.box_iou_rotated(t.turned(5), t.turned(7))


@case
def box_iou_quadri(t, ops):
    boxes = [t.corners(5).unbind(1) for _ in range(2)]
    quads = [torch.stack([a, b, c, b, c, d, a, d], 1) for a, b, c, d in boxes]
    return ops.box_iou_quadri(*quads)


@case
def bezier_align(t, ops):
    curve = torch.tensor([0.0, 2, 2, 6, 1, 10, 3, 14, 2, 14, 9, 10, 8, 6, 9, 2, 8])
    image = t.normal(1, 3, 16, 16, grad=True)
    return ops.bezier_align(image, t.put(curve[None]), (2, 4), 1.0, 2, True)


@case
def psa_mask(t, ops):
    image = t.normal(2, 9, 3, 3, grad=True)
    return ops.PSAMask('collect', (3, 3))(image), ops.PSAMask('distribute', (3, 3))(image)


@case
def rotated_feature_align(t, ops):
    boxes = t.turned(2 * 4 * 4).view(2, 4, 4, 5)
    return ops.rotated_feature_align(t.normal(2, 3, 4, 4, grad=True), boxes, 1 / 8, 5)


@case
def active_rotated_filter(t, ops):
    indices = t.whole(8, 8, 3, 3, 4, dtype=torch.int32) + 1
    return ops.active_rotated_filter(t.normal(2, 3, 8, 3, 3, grad=True), indices)


@case
def hard_voxelize(t, ops):
    return ops.Voxelization([0.5, 0.5, 0.5], [0, 0, 0, 2, 2, 2], 4, 20)(t.uniform(40, 4) * 2)


@case
def dynamic_voxelize(t, ops):
    return ops.Voxelization([0.5, 0.5, 0.5], [0, 0, 0, 2, 2, 2], -1, -1)(t.uniform(40, 4) * 2)


@case
def points_in_boxes_cpu(t, ops):
    boxes = t.put(torch.tensor([[[1.0, 1, 0, 1, 1, 1, 0.3], [2.0, 1, 0, 2, 2, 2, 0]]]))
    return ops.points_in_boxes_cpu(t.uniform(1, 30, 3) * 2, boxes)


@case
def pixel_group(t, ops):
    score, embedding = t.uniform(6, 8), t.normal(6, 8, 4)
    label = t.put(torch.tensor([0, 0, 1, 1, 0, 2, 2, 0], dtype=torch.int32).repeat(6, 1))
    contour = t.put((torch.arange(48).view(6, 8) % 3 == 0).to(torch.uint8))
    found = ops.pixel_group(score, score > 0.2, embedding, label, contour, 3, 2.0)
    return tuple(torch.tensor(list(map(float, one))) for one in found)


@case
def contour_expand(t, ops):
    kernels = t.put((torch.arange(96).view(2, 6, 8) % 5 > 0).to(torch.uint8))
    label = t.put(torch.tensor([0, 0, 1, 1, 0, 2, 2, 0], dtype=torch.int32).repeat(6, 1))
    return torch.tensor(ops.contour_expand(kernels, label, 2, 2))


@case
def saconv(t, ops):
    """Switchable atrous convolution: a layer of several deformable convolutions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = ops.SAConv2d(4, 4, 3, padding=1, use_deform=True)
    layer.to(t.device)
    t.leaves.append(layer.weight)
    return layer(t.normal(1, 4, 6, 6, grad=True))


@case
def multi_scale_deformable_attention(t, ops):
    """mmcv computes it in PyTorch where it is not CUDA."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = ops.MultiScaleDeformableAttention(8, 2, 2, 2, dropout=0.0, batch_first=True)
        layer.init_weights()
    layer.to(t.device)
    shapes = torch.tensor([[4, 4], [2, 2]])
    return layer(
        t.normal(1, 5, 8, grad=True),
        value=t.normal(1, 20, 8, grad=True),
        reference_points=t.uniform(1, 5, 2, 2),
        spatial_shapes=t.put(shapes),
        level_start_index=t.put(torch.tensor([0, 16])),
    )


def run_case(name, device, dtype=torch.float32):
    """Run a case on a device, in a precision.

    Returns:
        tuple: What it returned and the gradients, on the host.
    """
    tensors = Tensors(device, dtype)
    returned = CASES[name](tensors)
    results = list(returned) if isinstance(returned, tuple) else [returned]
    total = sum((one.float() ** 2).sum() for one in results if one.requires_grad)
    if tensors.leaves:
        total.backward()
    grads = [leaf.grad for leaf in tensors.leaves]
    return [one.detach().cpu() for one in results], [grad.cpu() for grad in grads]
