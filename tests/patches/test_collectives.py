"""Collectives that models call by themselves, on devices whose tensors gloo refuses."""

import pytest
import torch
from torch import distributed as torch_dist

from tests.jobs import install_card, torch_before
from tests.ranks import run_ranks


def call_all(accelerator):
    """What a model may call, with tensors of the device; the results as lists."""
    from mmdevplug import init_device
    from mmdevplug.patches.collectives import restore_collectives

    install_card(accelerator)
    original = torch_dist.all_reduce
    context = init_device('pytorch', accelerator, forced_backend='gloo', timeout=60)
    rank, device = context.env.rank, context.device
    found = {}

    def mine(*shape):
        return torch.full(shape or (2,), rank + 1.0).to(device)

    def note(name, *tensors):
        assert all(tensor.device == device for tensor in tensors), name
        found[name] = [tensor.detach().cpu().tolist() for tensor in tensors]

    tensor = mine()
    assert torch_dist.all_reduce(tensor) is None
    note('all_reduce', tensor)
    tensor = mine()
    torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX)
    note('largest', tensor)
    tensor = mine()
    work = torch_dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    note('later', tensor)
    tensor = mine()
    torch_dist.broadcast(tensor, 1)
    note('broadcast', tensor)
    # As contrastive models gather features that backward goes through.
    feature = (mine(1, 2).requires_grad_() * 2).exp()
    parts = [torch.zeros(1, 2).to(device) for _ in range(2)]
    torch_dist.all_gather(tensor_list=parts, tensor=feature)
    note('all_gather', *parts)
    feature.sum().backward()
    if not torch_before('2.0.0'):
        output = torch.zeros(2, 2).to(device)
        torch_dist.all_gather_into_tensor(output, mine(1, 2))
        note('all_gather_into_tensor', output)
    # On the host as before, also in one call with others.
    tensor = torch.ones(1)
    torch_dist.all_reduce(tensor)
    found['host'] = tensor.tolist()
    patched = torch_dist.all_reduce is not original
    restore_collectives()
    assert torch_dist.all_reduce is original
    return found, patched


def check(accelerator, patched):
    first, second = (2.0 * torch.tensor([1.0, 2.0])).exp().tolist()
    environ = dict(CPU_NUM_DEVICES='2') if accelerator == 'xla' else {}
    for found, was_patched in run_ranks(call_all, 2, accelerator, environ=environ):
        assert was_patched == patched
        assert found.pop('all_gather') == [
            [[pytest.approx(first)] * 2],
            [[pytest.approx(second)] * 2],
        ]
        gathered = found.pop('all_gather_into_tensor', None)
        assert gathered in (None, [[[1.0, 1.0], [2.0, 2.0]]])
        assert found == dict(
            all_reduce=[[3.0, 3.0]],
            largest=[[2.0, 2.0]],
            later=[[3.0, 3.0]],
            broadcast=[[2.0, 2.0]],
            host=[2.0],
        )


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_collectives_of_models(accelerator):
    check(accelerator, patched=accelerator == 'zeta')


@pytest.mark.xla
def test_collectives_of_models_on_torch_xla():
    check('xla', patched=True)
