"""Micro-batches: the gradients of the whole batch, and no pass back before the last forward."""

import copy

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mmdevplug.errors import ModelError
from mmdevplug.model_parallel import microbatches
from mmdevplug.model_parallel.microbatches import split_batches


class Model(BaseModel):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()
        self.sizes = []

    def forward(self, inputs, data_samples=None, mode='tensor'):
        found = self.norm(self.layer(inputs))
        if mode != 'loss':
            return found
        self.sizes.append(len(inputs))
        targets = torch.stack([sample['target'] for sample in data_samples])
        error = (found - targets).square()
        return dict(loss_mean=error.mean(), losses=[error.mean(1), error.abs().mean()])


def batch(size):
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 4, generator=generator)
    targets = torch.randn(size, 3, generator=generator)
    return inputs, [dict(target=target) for target in targets]


def gradients(model, size):
    inputs, data_samples = batch(size)
    losses = model(inputs=inputs, data_samples=data_samples, mode='loss')
    loss, logged = model.parse_losses(losses)
    model.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()], logged


@pytest.mark.parametrize(
    ('size', 'parts', 'sizes'), [(8, 4, [2] * 4), (7, 3, [2, 2, 3]), (2, 4, [1, 1]), (5, 1, [5])]
)
def test_gradients_are_those_of_the_whole_batch(size, parts, sizes):
    whole, split = Model(), split_batches(Model(), parts)
    expected, found = gradients(whole, size), gradients(split, size)
    assert split.sizes == sizes
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    assert found[2].keys() == expected[2].keys()


def test_all_forward_passes_come_before_the_backward_pass():
    model, events = split_batches(Model(), 3), []
    model.layer.register_forward_hook(lambda *_: events.append('forward'))
    model.layer.register_full_backward_hook(lambda *_: events.append('backward'))
    gradients(model, 6)
    assert events == ['forward'] * 3 + ['backward'] * 3


def test_validation_is_not_split():
    model = split_batches(Model(), 4)
    inputs, _ = batch(8)
    assert model(inputs, mode='tensor').shape == (8, 3)
    with torch.no_grad():
        gradient_free = model(inputs=inputs, data_samples=batch(8)[1], mode='loss')
    assert model.sizes == [8]
    assert gradient_free['losses'][0].shape == (8,)


def test_a_copy_of_the_model_is_its_own():
    model = split_batches(Model(), 2)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.layer.weight)
    nn.init.zeros_(other.layer.bias)
    assert other(torch.ones(1, 4), mode='tensor').abs().sum() == 0
    assert model(torch.ones(1, 4), mode='tensor').abs().sum() > 0


def test_batch_norm_is_warned_of(monkeypatch):
    logged = []
    monkeypatch.setattr(microbatches, 'log_warning', logged.append)
    split_batches(Model(norm=True), 2)
    assert 'see one micro-batch at a time' in logged[0]


def test_arguments_that_disagree():
    model = split_batches(Model(), 2)
    with pytest.raises(ModelError, match="'inputs': 4, 'data_samples': 3"):
        model(inputs=torch.ones(4, 4), data_samples=[{}] * 3, mode='loss')


class Fickle(Model):
    def forward(self, inputs, data_samples=None, mode='tensor'):
        losses = super().forward(inputs, data_samples, mode)
        return losses if len(self.sizes) > 1 else dict(losses, loss_first=losses['loss_mean'])


def test_losses_of_some_micro_batches_alone():
    with pytest.raises(ModelError, match='loss_first'):
        gradients(split_batches(Fickle(), 2), 4)
