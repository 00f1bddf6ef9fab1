"""What spread layers write into the arguments that their model gave them."""

import copy

import pytest
import torch
from torch import nn

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import dispatch, plan
from tests.jobs import install_card
from tests.ranks import in_ranks

pytest.importorskip('accelerate', reason='needs HF accelerate')


class Kept:
    """An argument with a method ``to``, as a data sample has one."""

    def __init__(self, sums, names=()):
        self.sums, self.names = sums, set(names)

    def to(self, device, non_blocking=False):
        return Kept(self.sums.to(device), self.names)


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number

    def forward(self, x, memory, losses, named, nested, kept, weighted):
        y = torch.tanh(self.linear(x))
        memory[self.number] = y.detach().mean(0)
        losses.append(y.pow(2).mean())
        named[f'layer {self.number}'] = y.mean()
        named.pop(f'layer {self.number - 2}', None)
        nested[0]['deep'].append(self.number)
        kept.sums += 1
        kept.names.add(self.number)
        kept.last = self.number
        weighted.mul_(y.mean(0))  # with gradients
        return y + memory.mean(0) + weighted


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(map(Layer, range(6))), nn.Linear(8, 1)

    def forward(self, x):
        memory = torch.zeros(6, 8, device=x.device)
        losses, named, nested, kept = [], {}, ({'deep': []}, 1), Kept(memory.new_zeros(2))
        weighted = x.new_ones(8) * 1
        for layer in self.layers:
            x = layer(x, memory, losses, named, nested, kept=kept, weighted=weighted)
        loss = sum(each.cpu() for each in [*losses, *named.values(), self.head(x).pow(2).mean()])
        seen = [sorted(named), nested, kept.sums.tolist(), kept.names, kept.last]
        return loss, [*seen, memory.cpu(), weighted.detach().cpu()]


def written(devices, copied):
    model = Net()
    if devices:
        install_card('zeta')
        dispatch(model, plan(model, devices, training=True, strategy='balanced'))
    if copied:
        model = copy.deepcopy(model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    with DeviceGuard('move', model=model):
        for seed in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            loss, seen = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append((loss.item(), *seen))
        with torch.inference_mode():
            found.append(model(x)[1][-2])
    return found


@pytest.mark.parametrize('copied', [False, True])
@in_ranks()
def test_what_layers_write_is_what_one_device_writes(copied):
    found, expected = written('zeta:0-2', copied), written(None, False)
    assert expected[0][3] == [6.0, 6.0]
    for step, other in zip(found[:3], expected):
        assert step[1:6] == other[1:6]
        torch.testing.assert_close((step[0], *step[6:]), (other[0], *other[6:]))
    torch.testing.assert_close(found[3], expected[3])


@in_ranks()
def test_a_layer_that_was_replaced_is_named():
    install_card('zeta')
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    dispatch(model, plan(model, 'zeta:0-2', training=True))
    model[4] = nn.Linear(8, 8)
    words = '4 of Sequential is another module than at dispatch'
    with pytest.raises(PlacementError, match=words):
        DeviceGuard('move', model=model).__enter__()
    model[4].to(model.device_plan.device_of('4.weight'))
    with DeviceGuard('move', model=model):
        assert model(torch.ones(1, 8)).device.type == 'cpu'  # where its input was
