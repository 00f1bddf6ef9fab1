"""mmseg's focal loss of labels, against its formula."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mmdevplug import get_accelerator
from mmdevplug.model.passes import Preparation, prepare
from mmdevplug.patches.mmengine import restore_mmengine
from tests.jobs import need_mmcv_operators

pytestmark = pytest.mark.operators


@pytest.fixture
def focal_loss():
    """The class, as a model finds it that has been prepared for the CPU."""
    need_mmcv_operators()
    from mmseg.models.losses import FocalLoss

    for _ in range(2):
        prepare(nn.Linear(1, 1), Preparation(get_accelerator('cpu'), torch.device('cpu')))
    yield FocalLoss
    restore_mmengine()


def formula(pred, labels, alpha=0.5, class_weight=1.0, weight=1.0):
    """Of each pixel and class, in float64; 0 where the label is 255."""
    pred = pred.double()
    count = pred.shape[1]
    first = 1 if count == 1 else 0
    one_hot = functional.one_hot(labels, 256)[..., first : first + count]
    target = one_hot.movedim(-1, 1).double()
    chance = pred.sigmoid() * (2 * target - 1) + 1 - target  # of what the label says
    shape = (1, -1, *[1] * (pred.dim() - 2))
    alpha, class_weight = (
        torch.tensor(each).double().expand(count).view(shape) for each in (alpha, class_weight)
    )
    factor = torch.where(target == 1, alpha, 1 - alpha) * class_weight
    loss = -factor * (1 - chance) ** 2 * chance.log()
    return loss * (labels != 255).unsqueeze(1) * weight


@pytest.mark.parametrize('classes', [1, 2, 5])
@pytest.mark.parametrize('size', [(4, 6), (24,), ()], ids=len)
def test_labels_of_pixels(focal_loss, classes, size):
    torch.manual_seed(0)
    pred = torch.randn(8, classes, *size, requires_grad=True)
    labels = torch.randint(0, max(classes, 2), (8, *size))
    labels[0] = 255
    expected = formula(pred, labels)
    loss = focal_loss()(pred, labels)
    torch.testing.assert_close(loss.double(), expected.mean())
    loss.backward()
    assert not pred.grad[0].any()
    assert pred.grad[1:].abs().min() > 0
    each = focal_loss(reduction='none')(pred, labels)
    torch.testing.assert_close(each.double(), expected, atol=1e-6, rtol=1e-5)


def test_options(focal_loss):
    torch.manual_seed(0)
    pred, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    options = dict(alpha=[0.2, 0.5, 0.9], class_weight=[1.0, 2.0, 3.0])
    weight = torch.rand(32)
    expected = formula(pred, labels, weight=weight.view(2, 1, 4, 4), **options)
    loss = focal_loss(**options)(pred, labels, weight=weight, avg_factor=7)
    torch.testing.assert_close(loss.double(), expected.sum() / 7)


@pytest.mark.parametrize('ignored', [0, 1])
def test_a_class_that_is_ignored(focal_loss, ignored):
    pred, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    loss = focal_loss(reduction='none')(pred, labels, ignore_index=ignored)
    kept = (labels != ignored).unsqueeze(1)
    torch.testing.assert_close(loss.double(), formula(pred, labels) * kept, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize('label', [-1, 4])
def test_a_label_that_is_no_class_is_nan(focal_loss, label):
    pred, labels = torch.randn(1, 3, 4, 4), torch.full((1, 4, 4), 3)  # of no class
    assert focal_loss()(pred, labels).isfinite()
    labels[0, 0, 0] = label
    assert focal_loss()(pred, labels).isnan()


def test_probabilities_are_passed_on(focal_loss):
    pred, target = torch.randn(6, 3), torch.rand(6, 3)
    patched = focal_loss()(pred, target)
    assert patched.equal(focal_loss.forward.__wrapped__(focal_loss(), pred, target))


def test_mmseg_alone_fails(focal_loss):
    """When it does not, the replacement can go."""
    restore_mmengine()
    with pytest.raises(RuntimeError, match='size of tensor'):
        focal_loss()(torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long))
