"""What tensors of torch_xla do by their methods, compared with those of the host."""

import pytest
import torch

from tests.ranks import in_ranks

pytestmark = pytest.mark.xla


@in_ranks()
def test_indices_of_a_sort_and_names_of_types():
    import mmdevplug

    mmdevplug.init_device('none', 'xla')
    mmdevplug.patch_mmengine('xla')
    torch.manual_seed(0)
    values, scores = torch.rand(6, 3), torch.rand(6)
    found = []
    for device in ('cpu', 'xla'):
        here = values.detach().to(device).requires_grad_()
        order = scores.to(device).sort(0, descending=True)[1]
        best = torch.index_select(input=here, dim=0, index=scores.to(device).topk(2)[1])
        (here.index_select(0, order).pow(2).sum() + best.sum()).backward()
        found.append((here.grad.cpu().tolist(), best.cpu().tolist()))
    numbers = torch.ones(2, dtype=torch.int32).type(here.type())
    assert (numbers.device, numbers.dtype) == (here.device, torch.float32)
    assert here.type('torch.xla.HalfTensor').dtype == torch.float16
    assert here.type('torch.FloatTensor').device.type == 'cpu'
    host, there = found
    assert there == host


@pytest.mark.operators
@in_ranks()
def test_rotated_boxes_are_suppressed_as_on_the_host():
    from mmcv.ops import nms_quadri, nms_rotated

    import mmdevplug

    mmdevplug.init_device('none', 'xla')
    mmdevplug.patch_mmengine('xla')
    torch.manual_seed(0)
    scores, labels = torch.rand(30), torch.randint(0, 2, (30,)).float()
    rotated = torch.rand(30, 5) * torch.tensor([40.0, 40.0, 20.0, 20.0, 3.0])
    found = []
    for suppress, boxes in ((nms_rotated, rotated), (nms_quadri, torch.rand(30, 8) * 30)):
        for device in ('cpu', 'xla'):
            given = [tensor.to(device) for tensor in (boxes, scores, labels)]
            kept = suppress(*given[:2], 0.1, given[2])
            found.append([tensor.cpu().tolist() for tensor in kept])
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert 0 < len(found[0][1]) < 30
