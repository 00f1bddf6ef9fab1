"""Moving modules, and initializing them on the host while they are on a device."""

import weakref

import pytest
import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from torch import nn

from mmdevplug.accelerators import get_accelerator
from mmdevplug.model import move
from mmdevplug.model.move import misplaced_tensors, move_module, weights_on_host
from tests.jobs import install_card
from tests.ranks import in_ranks, run_ranks


class Model(BaseModel):
    def __init__(self):
        super().__init__(data_preprocessor=BaseDataPreprocessor())
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer('mean', torch.ones(4))
        self.register_buffer('same_mean', self.mean)

    def forward(self, inputs, mode='tensor'):
        return self.second(self.first(inputs))


@in_ranks()
def test_sharing_and_preprocessors_survive():
    install_card('zeta')
    accelerator = get_accelerator('zeta')
    device = accelerator.device(2)
    holder = nn.ModuleDict(dict(model=Model()))  # whose `to` does not reach preprocessors
    misplaced = 'model.first.weight', 'model.data_preprocessor (data preprocessor)', 'model.mean'
    assert {*misplaced} <= {*misplaced_tensors(holder, device)}
    move_module(holder, device)
    model = holder['model']
    assert not misplaced_tensors(holder, device)
    assert model.second.weight is model.first.weight
    assert model.same_mean is model.mean
    assert model.data_preprocessor.device == device
    parameter = model.first.weight
    with weights_on_host(holder, accelerator):
        assert model.first.weight.device.type == 'cpu'
        assert model.second.weight is model.first.weight
        torch.manual_seed(3)
        nn.init.normal_(model.first.weight)
        model.mean.zero_()
    assert model.first.weight is parameter
    torch.manual_seed(3)
    assert torch.equal(parameter.cpu(), nn.init.normal_(torch.empty(4, 4)))
    assert model.mean.cpu().tolist() == [0.0] * 4


class Hooked(BaseModel):
    """Hooks, attributes and references that a model makes when it is built and initialized."""

    def __init__(self):
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4)
        self.first.weight.register_hook(lambda grad: grad * 0)
        self.first.weight.kind = 'first'
        self.biases, self.pair = {'first': self.first.bias}, (self.first.weight, self.last.weight)
        self.weak = weakref.ref(self.first.bias)

    def init_weights(self):
        nn.init.ones_(self.last.weight)
        weight, bias = self.last.weight, self.last.bias
        bias.requires_grad_(False)
        weight.register_hook(lambda grad: grad * (weight > 0) * 3)
        if hasattr(weight, 'register_post_accumulate_grad_hook'):
            weight.register_post_accumulate_grad_hook(
                lambda held: setattr(held, 'grad', held.grad * 2)
            )
        else:
            weight.register_hook(lambda grad: grad * 2)
        self.kinds = [self.first.weight.kind, bias]

    def forward(self, inputs, mode='tensor'):
        return self.last(self.rnn(self.first(inputs))[0]).sum()


def gradients_of_hooked(kind, swaps=True):
    """Build, move, initialize and run a model; return the gradients."""
    accelerator = install_card(kind) or get_accelerator(kind)
    move.SWAPS_TENSORS = move.SWAPS_TENSORS and swaps  # there is no way before PyTorch 2.3
    torch.manual_seed(0)
    model, device = Hooked(), accelerator.device(0)
    optimizer, known = torch.optim.SGD(model.parameters(), lr=1.0), list(model.parameters())
    move.move_module(model, device)
    with move.weights_on_host(model, accelerator):
        model.init_weights()
    model(torch.ones(2, 1, 4).to(device)).backward()
    held = [*known, *optimizer.param_groups[0]['params']]
    if move.SWAPS_TENSORS:
        assert [id(p) for p in held] == 2 * [id(p) for p in model.parameters()]
        assert model.weak() is model.first.bias
    assert model.biases['first'] is model.first.bias
    assert model.pair[0] is model.first.weight
    assert model.pair[1] is model.last.weight
    assert model.kinds[0] == 'first'
    assert model.kinds[1] is model.last.bias
    return [None if p.grad is None else p.grad.cpu().tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    ('kind', 'swaps'),
    [('zeta', True), ('zeta', False), pytest.param('xla', True, marks=pytest.mark.xla)],
)
def test_hooks_attributes_and_references_survive(kind, swaps):
    expected, found = (run_ranks(gradients_of_hooked, 0, each, swaps)[0] for each in ('cpu', kind))
    assert set(sum(expected[0], [])) == {0.0}
    assert expected[-1] is None
    for one, other in zip(expected, found):
        assert one is other is None or torch.allclose(torch.tensor(one), torch.tensor(other))


class MovesItself(Model):
    """Has a tensor that is neither a parameter nor a buffer, and a ``to()`` that moves it."""

    calls = 0

    def to(self, *args, **kwargs):
        self.calls += 1
        self.anchors = torch.ones(2).to(*args, **kwargs)
        return super().to(*args, **kwargs)


@in_ranks()
@pytest.mark.parametrize('name', ['cpu', 'zeta'])
def test_a_model_that_moves_itself_is_asked_to_on_every_device(name):
    if name == 'zeta':
        install_card('zeta')
    device = get_accelerator(name).device(0)
    model = move_module(MovesItself(), device)
    assert (model.calls, model.anchors.device.type) == (1, name)
