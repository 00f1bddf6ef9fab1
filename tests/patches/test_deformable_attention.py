"""Sizes of feature maps that stay on the host, on the device ``meta``, which has no values."""

import pytest
import torch

from mmdevplug.patches.deformable_attention import patch_deformable_attention
from mmdevplug.patches.mmengine import restore_mmengine

META = torch.device('meta')


@pytest.fixture
def sizes():
    patch_deformable_attention('meta')
    maps = [torch.empty(2, 3, height, 2 * height, device=META) for height in (4, 2)]
    try:
        yield torch.cat([torch._shape_as_tensor(each)[2:].to(META) for each in maps]).view(-1, 2)
    finally:
        restore_mmengine()


def test_numbers_are_read_on_the_host(sizes):
    assert [(int(height), int(width)) for height, width in sizes] == [(4, 8), (2, 4)]
    assert (sizes[:, 0] * sizes[:, 1]).sum() == 40
    value = torch.empty(1, 40, 6, device=META)
    parts = value.split([height * width for height, width in sizes], dim=1)
    assert [part.shape[1] for part in parts] == [32, 8]
    assert parts[0].reshape(6, *sizes[0]).shape == (6, 4, 8)


def test_tensors_of_the_device_get_copies(sizes):
    offsets = torch.empty(5, 2, 2, device=META, requires_grad=True)
    scaled = offsets / torch.stack([sizes[..., 1], sizes[..., 0]], -1)
    assert (type(scaled), scaled.device, scaled.requires_grad) == (torch.Tensor, META, True)
    one = offsets[:, 0, 0] * sizes[0, 1]
    assert (type(one), one.device) == (torch.Tensor, META)


def test_the_function_is_restored():
    original = torch._shape_as_tensor
    patch_deformable_attention('meta')
    patch_deformable_attention('meta')
    assert torch._shape_as_tensor is not original
    assert type(torch._shape_as_tensor(torch.ones(2))) is torch.Tensor
    restore_mmengine()
    assert torch._shape_as_tensor is original
