"""What DeviceGuard leaves alone, and trainings in which there is nothing to be found."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.device_guard.rules import Call, takes_several
from mmdevplug.errors import DeviceMismatchError
from tests.columns import LAZY, XLA
from tests.device_guard.test_guard import ONE, STOCK, TWO, refusal
from tests.jobs import PLAIN, install_card, needs_modes, torch_before, train_digits
from tests.ranks import in_ranks, run_ranks


def legal_operations(one, two):
    """Things that PyTorch does with tensors of several devices."""
    x, y, host = torch.ones(4, 4, device=one), torch.ones(4, 4, device=two), torch.ones(4, 4)
    number, index = torch.tensor(2.0), torch.tensor([0, 2])

    def set_data():
        z = x * 1
        z.data = y

    def assign(index, value):
        z = x * 1
        z[index] = value

    def pack():
        packed = nn.utils.rnn.pack_padded_sequence(x[None].transpose(0, 1), torch.tensor([4]))
        nn.utils.rnn.pad_packed_sequence(packed)

    def save():
        file = io.BytesIO()
        torch.save(dict(x=x, y=y), file)
        file.seek(0)
        torch.load(file, map_location='cpu', weights_only=True)

    def clip():
        parameters = [nn.Parameter(x * 1), nn.Parameter(y * 1)]
        for each in parameters:
            each.grad = each.detach() * 1
        nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.optim.AdamW(parameters).step()
        torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True).step()

    def differentiate():
        a, b = (x * 1).requires_grad_(), (y * 1).requires_grad_()
        torch.autograd.grad([(a * 2).sum(), (b * 2).sum()], [a, b])
        torch.autograd.backward([(a.to(two) * b).sum(), (a * 2).sum()])

    return dict(
        to=lambda: x.to(two) + x.to(y) + x.cpu().to(y),
        copy=lambda: (x * 1).copy_(y),
        type_as=lambda: x.type_as(y) + y,
        data=set_data,
        shapes=lambda: (x.view_as(y), x.expand_as(host), x.reshape_as(y), x.is_same_size(y)),
        new=lambda: (x.new_tensor([number, 1.0]), torch.zeros_like(x, device=two) + y),
        deepcopy=lambda: copy.deepcopy([x, y, host]),
        result_type=lambda: torch.result_type(x, y),
        broadcast=lambda: torch.broadcast_tensors(x, y),
        pad_sequence=lambda: nn.utils.rnn.pad_sequence([x, y]),
        pack=pack,
        tensor_split=lambda: x.tensor_split(index),
        number=lambda: x * number + (number - x) / number,
        number_compared=lambda: torch.maximum(x, number) > number,
        masked_fill=lambda: x.masked_fill(x > 0, number),
        fill=lambda: (x * 1).fill_(number),
        power=lambda: (x * 1).pow_(number),
        addcmul=lambda: (x * 1).addcmul_(x, number),
        host_index=lambda: (x[index], x[:, index], x[host > 0]),
        host_index_assigned=lambda: (assign(index, 0.0), assign(index, x[:2])),
        number_as_index=lambda: (x[torch.tensor(1)], x[1, torch.tensor(1)]),
        slice_assigned=lambda: (assign(slice(0, 4), y), assign((0, ...), host[0])),
        number_assigned=lambda: (assign(0, number), assign((0, 1), y.sum())),
        foreach=lambda: (torch._foreach_mul([x, y], 2.0), torch._foreach_norm([x, host])),
        foreach_pairs=lambda: torch._foreach_add([x, y], [x, y]),
        comparing=lambda: (x.device == y.device, x is y),
        module_to=lambda: nn.Linear(2, 2).to(one).to(two).cpu(),
        load=lambda: nn.Linear(2, 2).to(one).load_state_dict(nn.Linear(2, 2).state_dict()),
        save=save,
        clip=clip,
        differentiate=differentiate,
        printing=lambda: f'{x} {y}',
    )


@pytest.mark.parametrize('accelerator', ['zeta', XLA])
@in_ranks()
def test_what_pytorch_takes_is_left_alone(accelerator):
    install_card(accelerator)
    one, two = f'{accelerator}:0', f'{accelerator}:1'
    torch.zeros(1, device=two).cpu()
    refused, unknown = {}, []
    for name, function in legal_operations(one, two).items():
        try:
            function()
        except RuntimeError:
            unknown.append(name)
            continue
        try:
            with DeviceGuard() as guard:
                function()
        except DeviceMismatchError as error:
            refused[name] = str(error)
        with DeviceGuard('move') as guard:
            function()
        if guard.moved.number:
            refused[name] = guard.report()
    if accelerator == 'zeta':
        assert refused == {}
        assert unknown == [] or (unknown == ['addcmul'] and torch_before('2.9.0'))
    else:
        # torch_xla brings its own clip_grad_norm_, which stacks the norms of all devices.
        assert list(refused) == ['clip']
        assert 'torch.stack' in refused['clip']
        assert unknown == ['pack']  # torch_xla cannot.


@in_ranks()
def test_numbers_that_pytorch_refuses():
    """On the CPU, and PyTorch refuses them on cards at least."""
    install_card('zeta')
    x, number = torch.ones(2, 2, device=ONE), torch.tensor(2.0)
    total = torch.zeros(())
    for function, roles in (
        (lambda: torch.stack([x.sum(), number]), ['tensors[0]', 'tensors[1]']),
        (lambda: total.add_(x.sum()), ['input', 'other']),
        (lambda: torch.ones(2, 2) * x.sum(), ['input', 'other']),
        (lambda: F.embedding(torch.tensor(1), x), ['input', 'weight']),
        (lambda: torch._foreach_mul([x, x.to(TWO)], x.sum()), ['self[0]', 'self[1]', 'other']),
    ):
        told = refusal(function)
        assert [each.role for each in told.operands] == roles
    told = refusal(lambda: torch.ops.aten.mm.default(x, x.to(TWO)))
    assert told.operation == 'torch.ops.aten.mm.default'
    assert [each.role for each in told.operands] == ['self', 'mat2']
    told = refusal(lambda: torch.lerp(x, x.to(TWO), number))
    assert [each.left_alone for each in told.operands] == [False, False, True]
    with DeviceGuard(allow=['torch.equal', 'stack']):
        with pytest.raises(RuntimeError, match=STOCK):
            torch.equal(x, torch.ones(2, 2))
        with pytest.raises(RuntimeError, match=STOCK):
            torch.stack([x, x.to(TWO)])
        with pytest.raises(DeviceMismatchError):
            torch.cat([x, x.to(TWO)])


@pytest.mark.parametrize(
    ('index', 'copies'),
    [
        (torch.tensor(1), True),
        ((slice(None), torch.tensor(1)), True),
        (torch.tensor(True), False),
        (torch.tensor(1, dtype=torch.uint8), False),
        ((0, torch.tensor(True)), False),
    ],
)
def test_only_a_number_as_index_makes_an_assignment_a_copy(index, copies):
    args = (torch.ones(2, 2), index, torch.ones(2))
    assert takes_several(Call(torch.Tensor.__setitem__, '__setitem__', args, {}, [])) == copies


def guarded_digits(accelerator, work_dir):
    """A training that has nothing to be found, from the runner's building to its last hook."""
    with DeviceGuard() as guard:
        options = dict(PLAIN, train_cfg__max_epochs=1)
        told = train_digits(accelerator, work_dir, 512, **options)
    return told['device'], guard.report()


@needs_modes
@pytest.mark.parametrize('accelerator', ['zeta', LAZY])
def test_distributed_training_under_a_guard(tmp_path, accelerator):
    for device, report in run_ranks(guarded_digits, 2, accelerator, tmp_path):
        assert device.startswith(accelerator)
        assert report == 'No operation had operands on different devices.'
