"""Collectives that models call by themselves, on devices whose tensors gloo refuses."""

import math
import warnings

import pytest
import torch
import torch.distributed.nn
from mmengine import dist
from torch import distributed as torch_dist

from mmdevplug import DeviceDistributedDataParallel, init_device
from mmdevplug.patches.barrier import restore_barrier
from tests.columns import XLA
from tests.jobs import install_card, start, torch_before
from tests.ranks import in_ranks, run_ranks


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', XLA])
@in_ranks(2)
def test_collectives_of_models(accelerator):
    """What a model may call, with tensors of the device."""
    context = start(accelerator)
    rank, device = context.env.rank, context.device

    def mine(*shape):
        return torch.full(shape or (2,), rank + 1.0).to(device)

    def check(tensor, expected):
        assert tensor.device == device
        assert tensor.detach().cpu().tolist() == expected

    tensor = mine()
    assert torch_dist.all_reduce(tensor) is None
    check(tensor, [3.0, 3.0])
    tensor = mine()
    torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX)
    check(tensor, [2.0, 2.0])
    tensor = mine()
    work = torch_dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    check(tensor, [3.0, 3.0])
    tensor = mine()
    torch_dist.broadcast(tensor, 1)
    check(tensor, [2.0, 2.0])
    # As contrastive models gather features that backward goes through.
    feature = (mine(1, 2).requires_grad_() * 2).exp()
    parts = [torch.zeros(1, 2).to(device) for _ in range(2)]
    torch_dist.all_gather(tensor_list=parts, tensor=feature)
    for number, part in enumerate(parts, 1):
        check(part, [[pytest.approx(math.exp(2 * number))] * 2])
    feature.sum().backward()
    if not torch_before('2.0.0'):
        output = torch.zeros(2, 2).to(device)
        torch_dist.all_gather_into_tensor(output, mine(1, 2))
        check(output, [[1.0, 1.0], [2.0, 2.0]])
    # On the host as before, also in one call with others.
    tensor = torch.ones(1)
    torch_dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0]


# in three ranks, compared with the CPU -----------------------------------------------------------


def start_with(accelerator):
    """This rank's number, and a function that puts a tensor on its device."""
    context = start(accelerator)

    def put(*values, **kwargs):
        return torch.tensor(values, **kwargs).to(context.device)

    return context.env.rank, put


def contents(*tensors):
    """The values and dtypes of tensors."""
    return [(str(tensor.dtype), tensor.detach().cpu().tolist()) for tensor in tensors]


def check_as_on_the_cpu(function):
    expected = run_ranks(function, 3, 'cpu')
    assert run_ranks(function, 3, 'zeta') == expected
    return expected


def pass_by_groups(accelerator):
    """Call collectives of groups that overlap, in all ranks, as PyTorch allows it."""
    rank, put = start_with(accelerator)
    left, right = torch_dist.new_group([0, 1]), torch_dist.new_group([1, 2])
    first, second, third = put(rank + 1.0), put(rank + 1.0), put(rank + 1.0)
    parts = [put(0.0), put(0.0)]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that the rank is not in the group
        torch_dist.all_reduce(first, group=left)
        later = torch_dist.all_reduce(second, group=right, async_op=True)
        if later is not None:
            later.wait()
        torch_dist.broadcast(third, 2, group=right)
        torch_dist.all_gather(parts, put(rank + 1.0), group=left)
    return [tensor.item() for tensor in (first, second, third, *parts)]


@pytest.mark.filterwarnings('ignore')
def test_a_rank_passes_by_a_group_that_it_is_not_in():
    assert check_as_on_the_cpu(pass_by_groups) == [
        [3.0, 1.0, 1.0, 1.0, 2.0],
        [3.0, 5.0, 3.0, 1.0, 2.0],
        [3.0, 5.0, 3.0, 0.0, 0.0],
    ]


def send_all_kinds(accelerator):
    """Sum up tensors of many types and layouts, and reduce them in every way."""
    rank, put = start_with(accelerator)
    found = {}

    def reduce(name, tensor, op='SUM', shown=None):
        torch_dist.all_reduce(tensor, op=getattr(torch_dist.ReduceOp, op))
        found[name] = contents(tensor if shown is None else shown)

    for dtype in ('uint8', 'int32', 'int64', 'float16', 'float64'):
        reduce(dtype, put(1, 0, rank, dtype=getattr(torch, dtype)))
    reduce('scalar', put(rank + 1.0)[0])
    reduce('nothing', put()[:0])
    whole = put(1.0, 2.0, 3.0, 4.0)
    reduce('part', whole[1:3], shown=whole)
    reduce('transposed', (put(*range(6)) + rank).view(2, 3).t().contiguous())
    for op in ('MIN', 'MAX', 'PRODUCT', 'BAND', 'BOR', 'BXOR'):
        reduce(op, put(rank + 1, 3), op)
    return found


def test_types_layouts_and_operations():
    first, *others = check_as_on_the_cpu(send_all_kinds)
    assert others == [first, first]
    assert first['int64'] == [('torch.int64', [3, 0, 3])]
    assert first['part'] == [('torch.float32', [1.0, 6.0, 9.0, 4.0])]
    assert first['PRODUCT'] == [('torch.int64', [6, 27])]
    assert first['BXOR'] == [('torch.int64', [0, 3])]


def send_to_one(accelerator):
    """Collectives in which ranks have different parts."""
    rank, put = start_with(accelerator)
    found = {}
    total = put(rank + 1.0)
    torch_dist.reduce(total, 1)
    if rank == 1:  # undefined elsewhere
        found['reduce'] = contents(total)
    parts = [put(0.0) for _ in range(3)] if rank == 1 else None
    torch_dist.gather(put(rank + 1.0), parts, dst=1)
    found['gather'] = contents(*(parts or []))
    mine = put(0.0)
    torch_dist.scatter(mine, [put(5.0), put(6.0), put(7.0)] if rank == 2 else None, src=2)
    found['scatter'] = contents(mine)
    table = put(0.0, 0.0, 0.0, 0.0, 0.0, 0.0).view(3, 2)
    torch_dist.all_gather(list(table.unbind(0)), put(rank + 1.0, 0.0))
    found['into views'] = contents(table)
    if rank < 2:
        message = put(8.0 + rank)
        if rank == 0:
            torch_dist.send(message, 1)
        else:
            assert torch_dist.recv(message, 0) == 0
        found['message'] = contents(message)
    return found


def test_ranks_with_different_parts():
    first, second, third = check_as_on_the_cpu(send_to_one)
    assert second['reduce'] == contents(torch.tensor([6.0]))
    assert second['gather'] == contents(*torch.tensor([[1.0], [2.0], [3.0]]))
    assert [each['scatter'][0][1] for each in (first, second, third)] == [[5.0], [6.0], [7.0]]
    assert third['into views'] == contents(torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]))
    assert second['message'] == contents(torch.tensor([8.0]))


def go_backward(accelerator):
    """Collectives that backward goes through, as losses over the features of all ranks."""
    rank, put = start_with(accelerator)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # newer releases have other names for them
        for name in ('all_reduce', 'all_gather'):
            feature = put(rank + 1.0).requires_grad_()
            result = getattr(torch.distributed.nn, name)(feature * 2)
            if name == 'all_gather':
                result = torch.cat(result)
            (result * (rank + 1)).sum().backward()
            found.append(contents(result, feature.grad))
    return found


def test_backward_goes_through_collectives():
    for reduced, gathered in check_as_on_the_cpu(go_backward):
        assert reduced == contents(torch.tensor([12.0]), torch.tensor([12.0]))
        assert gathered == contents(torch.tensor([2.0, 4.0, 6.0]), torch.tensor([12.0]))


@in_ranks(2, environ=dict(FAKECARD_VARIANT='plain'))
def test_a_card_that_pytorch_does_not_know_as_its_accelerator_can_wait():
    """Barriers and a step on a card of which PyTorch cannot tell that it is the accelerator."""
    install_card('zeta')
    original = torch_dist.barrier
    config = dict(type='zeta', device_count=4)
    context = init_device('pytorch', config, forced_backend='gloo', timeout=60)
    torch_dist.barrier()
    dist.barrier()
    torch_dist.barrier(async_op=True).wait()
    model = DeviceDistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.ones(2, 3).to(context.device)).sum().backward()
    assert model.module.weight.grad.cpu().tolist() == [[2.0, 2.0, 2.0]]
    gathered = dist.collect_results([context.env.rank], 2, device='cpu')
    assert gathered == (None if context.env.rank else [0, 1])
    torch_dist.barrier(torch_dist.new_group([0]))  # which the other rank is not in
    told = context.describe()
    assert 'torch.zeta does not offer: ' in told
    assert 'get_rng_state (a resumed run draws other random numbers)' in told
    restore_barrier()
    assert torch_dist.barrier is original
