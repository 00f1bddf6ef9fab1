"""Batch normalization with frozen statistics, which torch_xla itself has no gradient of."""

import copy

import pytest
import torch
from mmengine.model.utils import _BatchNormXd
from torch import nn

from tests.ranks import in_ranks

pytestmark = pytest.mark.xla

CASES = {
    '1d': (lambda: nn.BatchNorm1d(5), (4, 5)),
    '2d': (lambda: nn.BatchNorm2d(5), (2, 5, 3, 4)),
    '3d': (lambda: nn.BatchNorm3d(5, affine=False), (2, 5, 3, 2, 2)),
    'Xd': (lambda: _BatchNormXd(5), (3, 5, 4)),
}


def train_twice(layer, shape, device):
    """The gradients of a training step with frozen statistics, then of one with the batch's."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator).to(device).requires_grad_()
    wanted = torch.randn(shape, generator=generator).to(device)
    found = []
    for training in (False, True):
        layer.train(training).zero_grad()
        (layer(inputs) * wanted).sum().backward()
        found += [one.grad.cpu().clone() for one in (inputs, *layer.parameters())]
    return [*found, *(buffer.cpu() for buffer in layer.buffers())]


@in_ranks()
def test_gradients_are_those_of_the_host():
    from mmdevplug import init_device
    from mmdevplug.accelerators import get_accelerator
    from mmdevplug.model.frozen_bn import FrozenGradient
    from mmdevplug.model.place_model import place_model

    context = init_device('none', 'xla')
    assert get_accelerator('xla').compilation.lazy
    differences = {}
    for name, (make, shape) in CASES.items():
        layer = make()
        for buffer in (layer.running_mean, layer.running_var):
            buffer.add_(torch.rand(5))
        kind = type(layer)
        placed = copy.deepcopy(place_model(copy.deepcopy(layer), context))
        assert isinstance(placed, kind)
        assert isinstance(placed, FrozenGradient)
        pairs = zip(train_twice(layer, shape, 'cpu'), train_twice(placed, shape, context.device))
        differences[name] = [(one - other).abs().max().item() for one, other in pairs]
    with pytest.raises(RuntimeError, match='size of mean'):
        train_twice(nn.BatchNorm2d(5).to(context.device), (2, 5, 3, 4), context.device)
    for name, found in differences.items():
        # 3 of each step with weight and bias, and three buffers.
        assert len(found) == (5 if name == '3d' else 9)
        # torch_xla keeps the biased variance.
        assert max(found[:-3]) <= 1e-5
