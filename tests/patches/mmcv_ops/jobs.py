"""What tests of mmcv's operators run in processes of their own."""

import os
import re
import traceback

import torch

from mmdevplug import init_device
from mmdevplug.accelerators import DeviceContext, get_accelerator, set_device_context
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.fault_tolerance.failure import fail_together
from tests.jobs import install_card
from tests.patches.mmcv_ops import checks
from tests.patches.mmcv_ops.cases import Tensors, run_case
from tests.xla.executions import counts


def prepare(accelerator):
    """Install what stands in for a device, and make it this process's accelerator."""
    install_card(accelerator)
    chosen = get_accelerator(accelerator)
    set_device_context(DeviceContext(chosen, 'a test', chosen.device(0), final=False))
    return chosen


def compare_cases(accelerator, names):
    """Run cases on the CPU and on a device, and tell in what they differ.

    ``difference`` is the largest, relative to the largest figure; ``sizes`` are the numbers of
    results and of gradients, ``uses`` the calls on the host by operator.
    """
    chosen = prepare(accelerator)
    found = {}
    for name in names:
        with checks.mmcv_ops_patched() as patch:
            expected, got = (run_case(name, place) for place in ('cpu', chosen.device(1)))
            pairs = [pair for each in zip(expected, got) for pair in zip(*each)]
            found[name] = dict(
                same=all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs),
                difference=max(_difference(one, two) for one, two in pairs),
                sizes=[[len(part) for part in each] for each in (expected, got)],
                uses=dict(patch.calls),
            )
    return found


def _difference(one, two):
    one, two = one.double(), two.double()
    return ((one - two).abs().max() / one.abs().max().clamp(min=1)).item()


def count_executions(accelerator):
    """Executions of one forward whose inputs are all still to be computed, by operator."""
    import mmcv.ops

    chosen = prepare(accelerator)
    t = Tensors(chosen.device(0))
    image, weight = t.normal(2, 4, 8, 8, grad=True), t.normal(5, 4, 3, 3, grad=True)
    offset, mask = t.normal(2, 18, 8, 8, grad=True), t.uniform(2, 9, 8, 8)
    boxes, scores, rois, turned = t.corners(20), t.uniform(20), t.rois(10), t.turned(5)
    forwards = dict(
        nms=lambda: mmcv.ops.nms(boxes + 1, scores * 2, 0.4),
        roi_align=lambda: mmcv.ops.roi_align(image[:1] * 2, rois * 1, (3, 3)),
        deform_conv=lambda: mmcv.ops.deform_conv2d(image * 2, offset + 1, weight * 3, 1, 1),
        modulated_deform_conv=lambda: mmcv.ops.modulated_deform_conv2d(
            image * 2, offset + 1, mask * 3, weight + 2, None, 1, 1, 1, 1, 1
        ),
        box_iou_rotated=lambda: mmcv.ops.box_iou_rotated(turned * 2, turned + 1),
    )

    found = {}
    with checks.mmcv_ops_patched():
        for name, forward in forwards.items():
            chosen.synchronize()
            before, _ = counts()
            forward()
            found[name] = counts()[0] - before
    return found


def try_without_a_case(accelerator, covered):
    """Call the operators that no case has called; return error and message by operator."""
    import mmcv._ext as extension

    chosen = prepare(accelerator)
    messages = {}
    with checks.mmcv_ops_patched() as patch:
        for name, function in patch.originals.items():
            signature = re.search(r'\w+\((\w+: .*?)\) ->', function.__doc__ or '')
            if name in covered or signature is None or 'Tensor' not in signature[1]:
                continue
            args = [_argument(part, chosen.device(0)) for part in _parameters(signature[1])]
            try:
                getattr(extension, name)(*args)
                messages[name] = ('', 'no error')
            except Exception as error:
                messages[name] = (type(error).__name__, str(error))
    return messages


def _parameters(signature):
    """The types of a signature's parameters."""
    return [part.split(': ', 1)[1] for part in re.split(r', (?=\w+: )', signature)]


def _argument(kind, device):
    if kind == 'torch.Tensor':
        return torch.zeros(1, 1, 1, 1, 1, device=device)
    if 'Sequence' in kind:
        return [1, 1]
    return {'bool': False, 'str': 'mean'}.get(kind, 1)


def run_checks(accelerator):
    """Run all checks in this process; return by name None, or the traceback."""
    chosen = prepare(accelerator)
    found = {}
    for name, check in checks.CHECKS.items():
        try:
            check(chosen)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    return found


def stop_where_one_rank_needs_the_host():
    """Rank 1 alone meets an operator without any kernel."""
    from mmcv.ops import RoIPool

    install_card('zeta')
    context = init_device('pytorch', 'zeta')
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), RoIPool(2))
    model.forward = lambda image, rois: model[1](model[0](image), rois)
    model.to(context.device)
    with fail_together('train'):
        if os.environ['RANK'] == '1':
            rois = torch.tensor([[0.0, 0, 0, 2, 2]], device=context.device)
            model(torch.zeros(1, 1, 4, 4, device=context.device), rois)
        else:
            wait_for_everyone('end of training')
