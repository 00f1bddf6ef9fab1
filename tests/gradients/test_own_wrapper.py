"""Wrappers of model repositories, which inherit from MMEngine's, on any device."""

import os

import pytest
import torch
from mmengine.model import BaseModel, MMDistributedDataParallel, MMSeparateDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmdevplug import registry
from mmdevplug.errors import ModelError
from mmdevplug.model.place_model import place_model
from tests.columns import NATIVE
from tests.gradients.averaging import rank
from tests.jobs import start
from tests.ranks import in_ranks


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 2)

    def forward(self, inputs, mode='tensor'):
        return dict(loss=self.fc(inputs).square().mean())

    def train_step(self, data, optim_wrapper):
        raise RuntimeError("the wrapper's train_step was not called")


class OwnStep:
    """As mmrazor's AutoSlim wrappers: ``device_ids`` of a launcher's variable, its own step."""

    def __init__(self, *, device_ids=None, **kwargs):
        if device_ids is None and os.environ.get('LOCAL_RANK') is not None:
            device_ids = [int(os.environ['LOCAL_RANK'])]
        super().__init__(device_ids=device_ids, **kwargs)

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            losses = self(**self.module.data_preprocessor(data, True), mode='loss')
        optim_wrapper.update_params(losses['loss'])
        return dict(own_loss=losses['loss'].detach())


class WithoutForward(MMDistributedDataParallel):
    """As mmrazor's GroupFisherDDP: it calls the module, which DDP does not hear of."""

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            loss = self.module(**self.module.data_preprocessor(data, True), mode='loss')['loss']
        optim_wrapper.update_params(loss)
        return dict(loss=loss.detach())


class OfMMEngine(OwnStep, MMDistributedDataParallel):
    pass


class OfPyTorch(OwnStep, DistributedDataParallel):
    pass


class Separate(MMSeparateDistributedDataParallel):
    def __init__(self, module, device_ids=None, **kwargs):
        super().__init__(module, device_ids=[0], **kwargs)

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self.module.fc):
            loss = self.module.fc(data['inputs'].to(self.module.fc.device)).square().mean()
        optim_wrapper.update_params(loss)
        return dict(own_loss=loss.detach())


class Past(MMDistributedDataParallel):
    """Calls its base by name, past ours."""

    def __init__(self, module, **kwargs):
        MMDistributedDataParallel.__init__(self, module, device_ids=[rank()], **kwargs)


def train(accelerator, kind):
    context = start(accelerator)
    wrapper = place_model(Net(), context, dict(type=kind, find_unused_parameters=True))
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.1))
    data = dict(inputs=torch.full((2, 4), 1.0 + rank()))
    return wrapper, wrapper.train_step(data, optim_wrapper)


def expected_weights(ranks=2):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for each in range(ranks):
        (net(torch.full((2, 4), 1.0 + each))['loss'] / ranks).backward()
    optimizer.step()
    return net.fc.weight.detach()


@pytest.mark.parametrize('kind', [OfMMEngine, OfPyTorch, Separate])
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE])
@in_ranks(2)
def test_trains_on_any_device(accelerator, kind):
    wrapper, logged = train(accelerator, kind)
    assert isinstance(wrapper, kind)
    assert type(wrapper).__name__ == kind.__name__
    assert list(logged) == ['own_loss']
    weights, _ = wrapper.parameters()
    assert (weights.detach().cpu() - expected_weights()).abs().max() <= 1e-6


@pytest.mark.parametrize('kind', [WithoutForward, OfMMEngine])
@in_ranks(2)
def test_a_step_that_averages_nothing_is_named(kind):
    told = []
    registry.log_warning = told.append
    train('cpu', kind)
    assert len(told) == (kind is WithoutForward)
    for text in told:
        assert 'WithoutForward.train_step() does not call super().train_step()' in text
        assert 'gradients are not averaged' in text


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@in_ranks(2, together=True)
def test_a_constructor_that_passes_ours_by_is_explained(accelerator):
    expected = "model_wrapper_cfg.type='Past': its constructor failed with"
    with pytest.raises(ModelError, match=expected) as raised:
        train(accelerator, Past)
    assert 'calls super().__init__(module=module, **kwargs)' in str(raised.value)
