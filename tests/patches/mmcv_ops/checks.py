"""What is checked on an eager card, in one process."""

import sys
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch

from mmdevplug.errors import DeviceMismatchError, ModelError
from mmdevplug.patches.mmcv_ops import (
    host_call,
    host_use,
    kernels,
    patch_mmcv_ops,
    restore_mmcv_ops,
)
from mmdevplug.patches.mmcv_ops.patch import OperatorPatch
from tests.patches.mmcv_ops.cases import CASES, Tensors, run_case

CHECKS = {}


@contextmanager
def mmcv_ops_patched():
    """Patch mmcv's operators for a while; yields the OperatorPatch."""
    patch_mmcv_ops()
    try:
        yield OperatorPatch.installed
    finally:
        restore_mmcv_ops()


def check(function):
    """Add a check, which gets the accelerator."""
    CHECKS[function.__name__] = function
    return function


@check
def served_when_imported_later_and_as_before_when_removed(accelerator):
    assert 'mmcv._ext' not in sys.modules
    before = list(sys.meta_path)
    patch_mmcv_ops()
    patch_mmcv_ops()
    assert len(sys.meta_path) == len(before) + 1
    import mmcv._ext
    from mmcv.ops import nms

    assert sys.meta_path == before
    device = accelerator.device(0)
    t = Tensors(device)
    nms(t.corners(9), t.uniform(9), 0.5)
    assert host_use() == dict(nms=1)
    replaced = mmcv._ext.nms
    patch_mmcv_ops()
    assert mmcv._ext.nms.__wrapped__ is replaced.__wrapped__
    assert not hasattr(mmcv._ext.nms.__wrapped__, '__wrapped__')
    assert host_use() == {}
    restore_mmcv_ops()
    assert mmcv._ext.nms is replaced.__wrapped__
    with pytest.raises(RuntimeError, match='not found'):
        nms(t.corners(9), t.uniform(9), 0.5)


#: Layers with weights in float32.
WITH_LAYERS = ('saconv', 'multi_scale_deformable_attention')


@check
def half_precision_on_the_cpu_is_computed_as_for_a_card(accelerator):
    without_layers = [name for name in CASES if name not in WITH_LAYERS]
    for name, dtype in product(without_layers, (torch.bfloat16, torch.float16)):
        with mmcv_ops_patched():
            expected = run_case(name, 'zeta:1', dtype)
        with mmcv_ops_patched() as patched:
            found = run_case(name, 'cpu', dtype)
            assert patched.calls == {}
        for of_card, of_cpu in zip(expected, found):
            assert [one.dtype for one in of_cpu] == [one.dtype for one in of_card], name
            assert all(map(torch.equal, of_cpu, of_card)), (name, dtype)


@check
def layers_on_the_cpu_work_under_autocast(accelerator):
    with mmcv_ops_patched(), torch.autocast('cpu', dtype=torch.bfloat16):
        for name in CASES:
            results, gradients = run_case(name, 'cpu')
            assert all(one.isfinite().all() for one in [*results, *gradients]), name


@check
def calls_are_counted(accelerator):
    with mmcv_ops_patched() as patched:
        run_case('roi_align', accelerator.device(0))
        assert patched.calls == dict(roi_align_forward=1, roi_align_backward=1)


@check
def half_precision_is_computed_in_single(accelerator):
    from mmcv.ops import roi_align

    t = Tensors('cpu')
    image, rois = t.normal(1, 2, 12, 12), t.rois(5)
    with mmcv_ops_patched():
        for dtype in (torch.float16, torch.bfloat16):
            on_card = image.to(dtype).to('zeta').requires_grad_()
            found = roi_align(on_card, rois.to(dtype).to('zeta'), (2, 2))
            expected = roi_align(image.to(dtype).float(), rois.to(dtype).float(), (2, 2))
            assert found.dtype is dtype
            assert torch.equal(found.cpu(), expected.to(dtype))
            found.sum().backward()
            assert on_card.grad.dtype is dtype


@check
def an_operator_without_a_kernel_for_the_cpu_says_so(accelerator):
    from mmcv.ops import roi_pool

    t = Tensors('zeta:0')
    with mmcv_ops_patched():
        with pytest.raises(ModelError, match='roi_pool_forward .* none for the CPU either'):
            roi_pool(t.normal(1, 1, 8, 8), t.rois(2), (2, 2))


@check
def tensors_of_two_cards_are_refused(accelerator):
    from mmcv.ops import nms

    t = Tensors('cpu')
    with mmcv_ops_patched():
        with pytest.raises(DeviceMismatchError, match='nms got tensors of zeta:0, zeta:1'):
            nms(t.corners(9).to('zeta:0'), t.uniform(9).to('zeta:1'), 0.5)


@check
def arguments_for_a_vendors_kernel_are_refused(accelerator):
    """On an NPU mmcv gives degrees to its kernel, which the host would take for radians."""
    assert 'npu' in kernels.VENDOR_ARGUMENTS['box_iou_rotated']
    with patch.dict(kernels.VENDOR_ARGUMENTS, box_iou_rotated=('zeta',)), mmcv_ops_patched():
        with pytest.raises(ModelError, match='prepares its arguments for that of zeta'):
            CASES['box_iou_rotated'](Tensors('zeta:0'))


@check
def a_kernel_of_the_vendor_is_used(accelerator):
    """A build of mmcv that has kernels for the card, but not for every operator."""
    seen = []

    def nms(boxes, *args):
        """nms(boxes: torch.Tensor) -> torch.Tensor"""
        seen.append(('nms', boxes.device.type))
        return boxes + 1

    def other(boxes, *args):
        """other(boxes: torch.Tensor) -> torch.Tensor"""
        seen.append(('other', boxes.device.type))
        if boxes.device.type != 'cpu':
            raise RuntimeError('other_impl: implementation for device zeta:0 not found.')
        return boxes + 2

    patched = OperatorPatch()
    patched.remove()
    patched.originals = dict(nms=nms, bbox_overlaps=other, other=other)
    boxes = torch.zeros(2, 4, device='zeta:0')
    assert patched.call(nms, (boxes,), {}).tolist() == (boxes + 1).tolist()
    assert patched.calls == {}
    seen.clear()
    for _ in range(2):
        result = patched.call(other, (boxes,), {})
        assert result.device.type == 'zeta'
        assert result.tolist() == (boxes + 2).tolist()
    assert seen == [('other', 'zeta'), ('other', 'cpu'), ('other', 'cpu')]
    assert patched.calls == dict(other=2)


@check
def an_error_of_the_operator_itself_is_not_hidden(accelerator):
    import mmcv._ext

    with mmcv_ops_patched():
        with pytest.raises(TypeError):
            mmcv._ext.nms(torch.zeros(2, 4, device='zeta:0'))
        with pytest.raises(IndexError):
            mmcv._ext.nms(torch.zeros(2, device='zeta:0'), torch.zeros(2, device='zeta:0'), 0.5, 0)


@check
def outputs_are_those_that_change(accelerator):
    """What is listed is what the operators write to, in all cases."""
    changed = {}

    def watch(_, function, args, kwargs):
        names = host_call.parameter_names(function)
        given = {**dict(zip(names, args)), **kwargs}
        tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        result = function(*args, **kwargs)
        found = changed.setdefault(function.__name__, set())
        found.update(
            name for name in tensors if host_call.has_changed(before[name], tensors[name])
        )
        return result

    OperatorPatch.installed = type('Watching', (OperatorPatch,), dict(call=watch))()
    try:
        for name in CASES:
            run_case(name, 'cpu')
    finally:
        restore_mmcv_ops()
    assert set(changed) == set(host_call.OUTPUTS)
    for name, found in changed.items():
        assert found == set(host_call.OUTPUTS[name]), name


@check
def an_operator_that_is_not_listed_is_patched_too(accelerator):
    with patch.dict(host_call.OUTPUTS):
        del host_call.OUTPUTS['roi_align_forward']
        with mmcv_ops_patched():
            expected, found = (run_case('roi_align', place) for place in ('cpu', 'zeta:1'))
    assert torch.equal(expected[0][0], found[0][0])
    assert torch.equal(expected[1][0], found[1][0])
