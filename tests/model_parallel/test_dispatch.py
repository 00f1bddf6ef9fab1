"""What a loop that is not MMEngine's meets around ``dispatch``."""

import copy
import re

import pytest
import torch
from torch import nn

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import dispatch, plan
from mmdevplug.model_parallel.dispatch import _check_ranks
from tests.jobs import install_card, needs_modes
from tests.ranks import in_ranks, run_ranks

pytest.importorskip('accelerate', reason='needs HF accelerate')


class Tied(nn.Module):
    """Two layers that share a weight, one that is frozen, and a parameter of the model itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.own = nn.Parameter(torch.ones(6))
        self.third.weight = self.first.weight
        self.second.weight.requires_grad_(False)

    def forward(self, x):
        own = self.own.to(x.device)
        return self.third(self.second(self.first(x * own)).tanh()).square().mean()


def descend(model, optimizer, inputs):
    """Losses after each of some steps, of which the first uses the gradients that there are."""
    losses = []
    for _ in range(4):
        optimizer.step()
        optimizer.zero_grad()
        loss = model(inputs)
        loss.backward()
        losses.append(loss.item())
    return losses


def train(devices, before):
    if devices is not None:
        install_card('zeta')
    model = Tied()
    inputs = torch.linspace(-1, 1, 24).reshape(4, 6)
    made = torch.optim.AdamW(model.parameters(), lr=0.05) if before else None
    model(inputs).backward()  # a gradient that the first step uses
    parameters = list(model.parameters())
    if devices is not None:
        dispatch(model, plan(model, devices, training=True, strategy='balanced'))
        assert {p.device.type for p in parameters} == {'zeta'}
        assert all(p.grad is None or p.grad.device == p.device for p in parameters)
    optimizer = made or torch.optim.AdamW(model.parameters(), lr=0.05)
    assert model.first.weight is model.third.weight
    assert not model.second.weight.requires_grad
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    return descend(model, optimizer, inputs)


@pytest.mark.parametrize('before', [True, False])
def test_an_optimizer_trains_whether_made_before_or_after(before):
    expected = train(None, before)
    assert len(set(expected)) == 4
    (found,) = run_ranks(train, 0, 'zeta:0-1', before)
    assert found == pytest.approx(expected, abs=1e-5)


@in_ranks()
def test_an_optimizer_and_hooks_follow_where_parameters_are_replaced():
    install_card('zeta')
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.third.weight.register_hook(torch.zeros_like)
    made = plan(model, 'zeta:0-1', training=True, strategy='balanced')
    del torch.utils.swap_tensors  # as before PyTorch 2.3
    dispatch(model, made)
    model(torch.ones(1, 6)).backward()
    held = [id(p) for p in optimizer.param_groups[0]['params']]
    assert held == [id(p) for p in model.parameters()]
    assert model.first.weight.grad.abs().sum() == 0 != model.own.grad.abs().sum()
    assert model.first.weight is model.third.weight


@pytest.mark.parametrize('kind', ['npu', 'mtia'])
def test_devices_that_are_not_there(kind):
    model = Tied()
    made = plan(model, f'{kind}:0-1', training=True, strategy='balanced')
    with pytest.raises(PlacementError, match=rf'device {kind}:0 .*cpu \(\d+\).*torch_{kind}'):
        dispatch(model, made)
    assert {p.device.type for p in model.parameters()} == {'cpu'}


@in_ranks()
def test_one_card_too_many():
    install_card('zeta')
    model = Tied()
    with pytest.raises(PlacementError, match=r'device zeta:4 .*not there.*zeta \(4\)'):
        dispatch(model, plan(model, 'zeta:3-4', training=True, strategy='balanced'))


def test_dispatch_takes_a_plan():
    text = re.escape("dispatch(model, plan(model, 'zeta:0-1', training=True))")
    with pytest.raises(PlacementError, match=text):
        dispatch(Tied(), 'zeta:0-1')


class Holder(nn.Module):
    """What a trainer moves, with the model inside."""

    def __init__(self, model):
        super().__init__()
        self.model = model


@in_ranks()
def test_a_move_after_dispatch_is_refused():
    install_card('zeta')
    model = Tied()
    dispatch(model, plan(model, 'zeta:0-1', training=True, strategy='balanced'))
    Holder(model).to(torch.float64)
    assert model.first.weight is model.third.weight
    assert model.own.dtype == torch.float64
    for call in (
        lambda: model.to('zeta:0'),
        lambda: model.cpu(),
        lambda: Holder(model).cpu(),
        lambda: copy.deepcopy(Holder(model)).to('cpu'),
    ):
        with pytest.raises(PlacementError, match=r'move of Tied, .*zeta:0, zeta:1.*\[model\]'):
            call()
    assert {p.device.type for p in model.parameters()} == {'zeta'}
    with DeviceGuard('move', model=Holder(model)) as guard:
        model(torch.ones(4, 6, dtype=torch.float64)).backward()
    assert 'All parameters' not in guard.report()
    weight = model.third.weight
    model.third.weight = nn.Parameter(weight.detach().clone())
    untied = r'first.weight and third.weight of Tied were one tensor'
    with pytest.raises(PlacementError, match=untied), DeviceGuard('move', model=model):
        pass
    model.third.weight = weight
    model.second.to('cpu')
    with pytest.raises(PlacementError, match=r'second.weight of Tied is on cpu, planned was zeta'):
        DeviceGuard('move', model=Holder(model)).__enter__()


class Head(nn.Module):
    """As that of a BERT: its bias is that of its last layer, too."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(6))
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.bias = self.bias

    def forward(self, x):
        return self.last(self.first(x)).square().mean()


class TiedToItsOwner(nn.Module):
    """Layers, and a head that is split."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), Head()
        self.head.last.weight = self.layers[0].weight

    def forward(self, x):
        return self.head(self.layers(x))


def train_tied(devices):
    model = TiedToItsOwner()
    parameters = list(model.parameters())
    if devices is not None:
        install_card('zeta')
        dispatch(model, plan(model, devices, training=True, strategy='balanced'))
    assert model.head.last.bias is model.head.bias
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs = torch.linspace(-1, 1, 24).reshape(4, 6)
    model(inputs).backward()
    return descend(model, optimizer, inputs)


@in_ranks()
def test_a_tensor_tied_to_one_of_a_split_module():
    assert train_tied('zeta:0-1') == pytest.approx(train_tied(None), abs=1e-6)


@needs_modes
def test_the_report_says_that_nothing_was_dispatched():
    model = Tied()
    with DeviceGuard('move', model=model) as guard:
        model(torch.ones(4, 6))
    assert 'All parameters of Tied are on cpu: no plan was dispatched.' in guard.report()


@pytest.fixture
def seen(monkeypatch):
    """What accelerate knows, of two ranks."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.delenv('ACCELERATE_BYPASS_DEVICE_MAP', raising=False)
    monkeypatch.setattr(AcceleratorState, '_shared_state', {})
    state = dict(num_processes=1)
    monkeypatch.setattr(PartialState, '_shared_state', state)
    return state


def test_ranks_that_accelerate_does_not_see(seen, monkeypatch):
    from accelerate.state import AcceleratorState

    text = r'num_processes=1, but WORLD_SIZE=2.*BYPASS_DEVICE_MAP'
    with pytest.warns(UserWarning, match=text):
        _check_ranks()
    monkeypatch.setattr(AcceleratorState, '_shared_state', seen)
    model = Tied()
    with pytest.raises(PlacementError, match=text):
        dispatch(model, plan(model, 'cpu', training=True, exclude_cpu=False))


def test_swapped_and_mistaken_arguments():
    model = Tied()
    made = plan(model, 'zeta:0-1', training=True, strategy='balanced')
    with pytest.raises(
        PlacementError, match=r'got DevicePlan as model and Tied as plan: expected'
    ):
        dispatch(made, model)
    with pytest.raises(PlacementError, match=r'Tied as plan: expected a module') as refused:
        dispatch(model, model)
    assert 'Linear' not in str(refused.value)
    with pytest.raises(PlacementError, match=r'devices is of type dict: .*not a device map'):
        plan(model, {'first': 'zeta:0'}, training=True)


class LossHead(nn.Linear):
    def loss(self, x, labels):
        """Without a call of forward, which accelerate's hooks know."""
        return nn.functional.mse_loss(x @ self.weight.t(), labels)


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), LossHead(6, 6)

    def forward(self, x, labels):
        return self.head.loss(self.body(x), labels)


@in_ranks()
def test_a_head_gets_what_its_own_methods_are_given_on_its_device():
    install_card('zeta')
    model, data = WithHead(), (torch.ones(2, 6), torch.zeros(2, 6))
    expected = model(*data).item()
    dispatch(model, plan(model, 'zeta:0-1', training=True, strategy='balanced'))
    assert len({p.device for p in model.parameters()}) == 2
    assert model(*data).item() == pytest.approx(expected, abs=1e-6)
