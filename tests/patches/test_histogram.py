"""Counts of more numbers than float32 can add up one by one."""

import pytest
import torch

from mmdevplug.patches.histogram import EXACT
from mmdevplug.patches.mmengine import patch_mmengine, restore_mmengine
from tests.jobs import need_mmcv_operators


@pytest.fixture
def patched():
    patch_mmengine('cpu')
    yield
    restore_mmengine()


def test_a_bin_holds_more_numbers_than_float32_adds_up(patched):
    labels = torch.zeros(EXACT + 8)
    labels[:4] = 2
    for counted in (torch.histc(labels, 3, 0, 2), labels.histc(3, 0, 2)):
        assert counted.tolist() == [EXACT + 4, 0, 4]
        assert counted.dtype == torch.float32
    labels[-4:] = -4  # the last part alone begins there
    assert labels.histc(bins=3).tolist() == [4, 0, EXACT + 4]


def test_few_numbers_are_counted_as_by_pytorch(patched):
    numbers = torch.rand(1000)
    assert torch.histc(numbers, 7).equal(torch.histogram(numbers, 7).hist)
    out = torch.empty(4)
    assert torch.histc(numbers.double(), 4, 0, 1).sum() == 1000
    assert torch.histc(numbers, 4, 0, 1, out=out).sum() == 1000 == out.sum()


@pytest.mark.operators
def test_mmseg_measures_an_image_of_twenty_million_pixels(patched):
    need_mmcv_operators()
    from mmseg.evaluation import IoUMetric

    label = torch.zeros(4000, 5000, dtype=torch.long)
    predicted = label.clone()
    predicted[:1000] = 1
    area = IoUMetric.intersect_and_union(predicted, label, num_classes=2, ignore_index=255)
    assert torch.stack(area).tolist() == [[15e6, 0], [20e6, 5e6], [15e6, 5e6], [20e6, 0]]
