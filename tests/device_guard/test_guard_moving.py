"""What DeviceGuard moves: the fewest bytes, nothing that is written to, gradients home."""

import pytest
import torch
import torch.nn.functional as F
from mmengine.optim import OptimWrapper

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DeviceMismatchError
from tests.columns import XLA
from tests.device_guard.test_guard import ONE, THREE, TWO, refusal, segmentor
from tests.jobs import install_card
from tests.ranks import in_ranks


@in_ranks()
def test_moves_are_counted_by_place():
    install_card('zeta')
    x, y = torch.ones(4, 4, device=ONE), torch.ones(2, 4, device=TWO)
    guard = DeviceGuard('move')
    assert guard.report() == 'No operation had operands on different devices.'
    for _ in range(3):
        with guard:
            F.linear(x, y)
            torch.stack([x[0], y[0], y[0]])  # A tensor each, though equal.
            torch.cat([x, y, y])
    number, size, sites = guard.moved
    assert number == 3 * (1 + 1 + 1)
    assert size == 3 * (32 + 16 + 32)
    assert {
        site.operation: (count.times, count.number, count.bytes) for site, count in sites.items()
    } == {
        'torch.nn.functional.linear': (3, 3, 96),
        'torch.stack': (3, 3, 48),
        'torch.cat': (3, 3, 96),
    }
    assert all(site.file == __file__ for site in sites)
    assert len({site.line for site in sites}) == 3
    report = guard.report()
    assert '9 operation(s) at 3 place(s)' in report
    assert '240 bytes were moved' in report
    assert report.count(__file__) == 3


@in_ranks()
def test_the_fewest_bytes_move():
    install_card('zeta')
    torch.manual_seed(0)
    big, small = torch.randn(64, 8, device=TWO), torch.randn(8, device=ONE)
    index, table = torch.tensor([1, 3], device=ONE), torch.randn(64, 8)

    def home(function, size, number=1):
        with DeviceGuard('move') as guard:
            result = function()
        assert guard.moved[:2] == (number, size)
        return str(result.device)

    assert home(lambda: small + big, 32) == TWO
    assert home(lambda: big[index], 16) == TWO
    assert home(lambda: torch.where(torch.ones(8, device=ONE) > 0, big, 0.0), 8) == TWO
    assert home(lambda: torch.cat([small, small.to(THREE), big.view(-1)]), 64, 2) == TWO
    assert home(lambda: torch.cat([small, small.to(TWO), small.to(THREE)]), 64, 2) == ONE
    # An index goes to a table on the CPU; a computation does not leave the accelerator.
    assert home(lambda: table[index], 16) == 'cpu'
    assert home(lambda: F.embedding(index, table), 16) == 'cpu'
    assert home(lambda: F.linear(table, small[None]), table.numel() * 4) == ONE
    # Lists operand by operand.
    with DeviceGuard('move') as guard:
        pair = torch._foreach_add([small, big], [small.to(TWO), small])
    assert guard.moved[:2] == (2, 64)
    assert [str(each.device) for each in pair] == [ONE, TWO]


@in_ranks()
def test_what_is_written_to_stays():
    install_card('zeta')
    big = torch.randn(64, 8, device=TWO)
    target, before = torch.zeros(8, device=ONE), big.sum(0).cpu()
    for change in (
        lambda: target.add_(big[0].sum() + big.sum(0)),
        lambda: torch.sum(big, 0, out=target),
        lambda: target.__setitem__(torch.arange(8, device=ONE), big.sum(0)),
        lambda: torch.ops.aten.add_(target, big.sum(0)),
        lambda: torch.ops.aten.add_.Tensor(target, big.sum(0)),
        lambda: torch._foreach_add_([target], [big.sum(0)]),
    ):
        target.zero_()
        place = target.data_ptr()
        with DeviceGuard('move') as guard:
            change()
        assert (str(target.device), target.data_ptr()) == (ONE, place)
        assert guard.moved.number == 1
        assert target.abs().sum().item() > 0
    torch.testing.assert_close(target.cpu(), before)
    # A table that an embedding renormalizes is written to as well.
    table = torch.full((2, 4), 9.0, device=ONE)
    with DeviceGuard('move'):
        F.embedding(torch.zeros(64, dtype=torch.long, device=TWO), table, max_norm=1.0)
    assert table[0].norm().item() == pytest.approx(1.0, abs=1e-3)
    # Two that are written to on two devices cannot be brought together.
    out = torch.empty(8, device=ONE), torch.empty(8, dtype=torch.long, device=TWO)
    told = refusal(lambda: torch.sort(big[0], out=out), policy='move')
    assert [each.role for each in told.operands] == ['input', 'out[0]', 'out[1]']
    told = refusal(lambda: torch.matmul(big, torch.empty(8, 8, device='meta')), policy='move')
    assert told.devices == (torch.device(TWO), torch.device('meta'))


class Scale(torch.autograd.Function):
    """With a context of its own, and an argument that is no tensor before those that are."""

    @staticmethod
    def forward(power, x, mask, w):
        return torch.where(mask, torch.matmul(x, w) * power, torch.zeros_like(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.power, x, mask, w = inputs
        ctx.save_for_backward(x, mask, w)

    @staticmethod
    def backward(ctx, gradient):
        x, mask, w = ctx.saved_tensors
        gradient = torch.where(mask, gradient, torch.zeros_like(gradient)) * ctx.power
        return None, torch.matmul(gradient, w.t()), None, torch.matmul(x.t(), gradient)


@in_ranks()
def test_gradients_of_custom_functions_go_home():
    install_card('zeta')
    torch.manual_seed(0)
    x, w, mask = torch.randn(4, 4), torch.randn(4, 4), torch.rand(4, 4) > 0.5
    results = []
    for first, second in (('cpu', 'cpu'), (ONE, TWO)):
        a = x.detach().clone().to(first).requires_grad_()
        b = w.detach().clone().to(second).requires_grad_()
        with DeviceGuard('move') as guard:
            for _ in range(2):
                loss = Scale.apply(3, a, mask.to(second), b).sum()
                loss.backward(retain_graph=True)
        assert a.grad.device == torch.device(first)
        assert b.grad.device == torch.device(second)
        results.append((a.grad.cpu(), b.grad.cpu()))
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected)
    assert any('ScaleBackward' in site.operation for site in guard.moved.sites)


def train_steps(one, two, policy='move'):
    """Losses and weights of a segmentor with its classifier on a device of its own."""
    model = segmentor().to(one)
    model.decode_head.conv_seg.to(two)
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), 0.1), clip_grad=dict(max_norm=1))
    torch.manual_seed(1)
    losses = []
    with DeviceGuard(policy, model=model) as guard:
        for _ in range(3):
            data = dict(inputs=torch.randn(2, 4), labels=torch.randint(3, (2,)))
            data = {name: value.to(one) for name, value in data.items()}
            losses.append(model.train_step(data, wrapper)['loss'].item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}, guard


@pytest.mark.parametrize('accelerator', ['zeta', XLA])
@in_ranks()
def test_train_step_of_a_model_on_two_devices(accelerator):
    install_card(accelerator)
    one, two = f'{accelerator}:0', f'{accelerator}:1'
    torch.zeros(1, device=two).cpu()
    losses, weights, guard = train_steps('cpu', 'cpu')
    assert guard.moved.number == 0
    found_losses, found, guard = train_steps(one, two)
    assert found_losses == pytest.approx(losses, abs=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5)
    places = {site.where for site in guard.moved.sites}
    assert places >= {'decode_head.conv_seg (Linear)', 'decode_head (Head)'}
    with pytest.raises(DeviceMismatchError) as caught:
        train_steps(one, two, 'error')
    assert caught.value.mismatch.module == 'decode_head.conv_seg (Linear)'
    assert [each.role for each in caught.value.mismatch.operands] == ['input', 'weight', 'bias']
