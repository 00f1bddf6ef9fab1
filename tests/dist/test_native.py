"""The stand-ins for vendors' collective backends: what they carry, what they refuse."""

import sys

import pytest
import torch
from torch import distributed as torch_dist

from tests.native import CARDS, STANDINS, needs_native, run_native

pytestmark = needs_native


sys.path.append(str(STANDINS / 'native'))
import vendor_names  # noqa: E402


def refused(call, *args, **kwargs):
    """The message with which a call is refused."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return 'accepted'


def start(backend):
    torch_dist.init_process_group(backend)
    return torch_dist.get_rank(), torch_dist.get_world_size()


def carry(name, backend):
    """Every collective once; what they gave, as lists."""
    rank, size = start(backend)
    getattr(torch, name).set_device(rank)
    device = torch.device(name, rank)

    def mine(*shape, dtype=torch.float32):
        return torch.full(shape or (2,), rank + 1, dtype=dtype, device=device)

    got = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool):
        tensor = mine(dtype=dtype)
        torch_dist.all_reduce(tensor)
        got[str(dtype)] = tensor.tolist()
    tensor = mine()
    torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX)
    got['max'] = tensor.tolist()
    tensor = mine()
    torch_dist.broadcast(tensor, 1)
    got['broadcast'] = tensor.tolist()
    tensor = mine()
    torch_dist.reduce(tensor, 0)
    got['reduce'] = tensor.tolist() if rank == 0 else 'elsewhere'
    parts = [torch.empty(2, device=device) for _ in range(size)]
    torch_dist.all_gather(parts, mine())
    got['all_gather'] = torch.stack(parts).tolist()
    whole = torch.empty(size * 2, device=device)
    torch_dist.all_gather_into_tensor(whole, mine())
    got['all_gather_into_tensor'] = whole.tolist()
    share = torch.empty(1, device=device)
    torch_dist.reduce_scatter_tensor(share, mine(size))
    got['reduce_scatter_tensor'] = share.tolist()
    torch_dist.reduce_scatter(share, [mine(1) for _ in range(size)])
    got['reduce_scatter'] = share.tolist()
    parts = [torch.empty(1, device=device) for _ in range(size)]
    torch_dist.all_to_all(parts, [mine(1) for _ in range(size)])
    got['all_to_all'] = torch.cat(parts).tolist()
    whole = torch.empty(size, device=device)
    torch_dist.all_to_all_single(whole, mine(size))
    got['all_to_all_single'] = whole.tolist()
    parts = [torch.empty(2, device=device) for _ in range(size)] if rank == 0 else None
    torch_dist.gather(mine(), parts)
    got['gather'] = torch.stack(parts).tolist() if rank == 0 else 'elsewhere'
    torch_dist.scatter(share, [mine(1) for _ in range(size)] if rank == 0 else None)
    got['scatter'] = share.tolist()
    works = torch_dist.batch_isend_irecv(
        [
            torch_dist.P2POp(torch_dist.isend, mine(), (rank + 1) % size),
            torch_dist.P2POp(torch_dist.irecv, tensor, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    got['p2p'] = tensor.tolist()
    tensor = mine()
    work = torch_dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    got['future'] = doubled.wait().tolist()
    torch_dist.barrier()
    objects = [None] * size
    torch_dist.all_gather_object(objects, dict(rank=rank))
    got['objects'] = objects
    listed = [f'of {rank}']
    torch_dist.broadcast_object_list(listed, 1)
    got['object_list'] = listed
    pair = torch_dist.new_group([0, 1])
    if rank < 2:
        tensor = mine()
        torch_dist.all_reduce(tensor, group=pair)
        got['pair'] = tensor.tolist()
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(2, 1, bias=False).to(device), device_ids=[rank]
    )
    model(mine(1, 2)).sum().backward()
    got['ddp'] = model.module.weight.grad.tolist()
    got['placed'] = str(tensor.device)
    got['refused'] = dict(
        host=refused(torch_dist.all_reduce, torch.ones(1)) if ':' not in backend else None,
        host_in_list=refused(torch_dist.all_gather, [torch.ones(2)] * size, mine()),
        layout=refused(torch_dist.all_reduce, mine(2, 3).t()),
        dtype=refused(
            torch_dist.broadcast, mine(dtype=torch.uint8).view(torch.float8_e5m2fnuz), 0
        ),
        double=refused(torch_dist.all_reduce, mine(dtype=torch.float64)),
        bitwise=refused(torch_dist.all_reduce, mine(dtype=torch.int32), torch_dist.ReduceOp.BAND),
        average=refused(torch_dist.all_reduce, mine(), torch_dist.ReduceOp.AVG),
        anyone=refused(torch_dist.recv, mine()),
        monitored=refused(torch_dist.monitored_barrier),
    )
    torch_dist.destroy_process_group()
    return got


def missing_names(name):
    """What a vendor's source lists as public and ``torch.<name>`` has not."""
    listed = vars(vendor_names)[name.upper()].split()
    return {each for each in listed if not hasattr(getattr(torch, name), each)}


@pytest.mark.parametrize('name', ['npu', 'mlu'])
def test_offers_what_the_vendor_lists(name):
    (missing,) = run_native(name, missing_names, 0, name)
    assert missing
    assert missing <= set(vendor_names.LEFT_OUT.split())


@pytest.mark.parametrize('name', CARDS)
def test_collectives(name):
    ranks = run_native(name, carry, 2, name, CARDS[name][1])
    for rank, got in enumerate(ranks):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64):
            assert got[str(dtype)] == [3, 3]
        assert got['torch.bool'] == [True, True]
        assert got['max'] == got['broadcast'] == [2, 2]
        assert got['all_gather'] == [[1, 1], [2, 2]]
        assert got['all_gather_into_tensor'] == [1, 1, 2, 2]
        assert got['reduce_scatter_tensor'] == got['reduce_scatter'] == [3]
        assert got['all_to_all'] == got['all_to_all_single'] == [1, 2]
        assert got['scatter'] == [1]
        assert got['p2p'] == [2 - rank, 2 - rank]
        assert got['future'] == [6, 6]
        assert got['objects'] == [dict(rank=0), dict(rank=1)]
        assert got['object_list'] == ['of 1']
        assert got['pair'] == [3, 3]
        assert got['ddp'] == [[1.5, 1.5]]
        assert got['placed'] == f'{name}:{rank}'
    assert ranks[0]['reduce'] == [3, 3]
    assert ranks[0]['gather'] == [[1, 1], [2, 2]]
    for got in ranks:
        label, backend = name.upper(), CARDS[name][1].upper()
        says = got['refused']
        assert 'No backend type associated with device type cpu' in says['host']
        assert f'Tensors must be {label} and dense' in says['host_in_list']
        assert 'contiguous' in says['layout']
        assert says['dtype'] == f'Unsupported data type for {backend} process group'
        assert (
            'HCCL allreduce: Unsupported data type' in says['double']
            if name == 'npu'
            else says['double'] == 'accepted'
        )
        assert says['bitwise'] == f'Cannot use ReduceOp.BAND with {backend}'
        assert says['average'] == (
            'Cannot use ReduceOp.AVG with CNCL' if name == 'mlu' else 'accepted'
        )
        assert says['anyone'] == f'ProcessGroup{backend} does not support recv'
        assert 'only implemented for GLOO' in says['monitored']


def compound(name, backend):
    """A group with gloo for host tensors."""
    rank, _ = start(f'cpu:gloo,{name}:{backend}')
    host, there = torch.ones(1), torch.ones(1, device=f'{name}:{rank}')
    torch_dist.all_reduce(host)
    torch_dist.all_reduce(there)
    told = torch_dist.get_backend()
    torch_dist.destroy_process_group()
    return host.item(), there.item(), told


def test_compound():
    for host, there, told in run_native('npu', compound, 2, 'npu', 'hccl'):
        assert (host, there) == (2, 2)
        assert 'hccl' in told or 'gloo' in told
