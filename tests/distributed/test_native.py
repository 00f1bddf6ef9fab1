"""The stand-ins for vendors' collective backends: what they carry, what they refuse."""

import os
import re
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine import dist as mmengine_dist
from torch import distributed as torch_dist, nn

import mmdevplug
from mmdevplug import init_device
from mmdevplug.accelerators import backend as backends
from mmdevplug.accelerators.backend import group_device
from mmdevplug.checkpoint.participants import RankBuffers
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.distributed.coalesced import broadcast_tensors
from mmdevplug.distributed.nonfinite import FinitePolicy
from mmdevplug.gradients.model_signature import check_same_model
from mmdevplug.samples import DynamicSampler, balance_samples, gather_samples
from mmdevplug.staged.shared_memory import group_by_host
from mmdevplug.utils.host import host_name
from mmdevplug.utils.pytree import tensors_in
from tests.columns import job_of
from tests.native import CARDS, STANDINS, needs_native, run_native
from tests.ranks import RanksFailed, in_ranks
from tests.t20.test_interface import describe, parameters_of

pytestmark = needs_native


sys.path.append(str(STANDINS / 'native'))
import vendor_names  # noqa: E402


def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return 'accepted'


def start(backend):
    torch_dist.init_process_group(backend)
    return torch_dist.get_rank(), torch_dist.get_world_size()


def check_collectives(name, backend):
    """Every collective once, and what it refuses."""
    rank, size = start(backend)
    getattr(torch, name).set_device(rank)
    device = torch.device(name, rank)

    def mine(*shape, dtype=torch.float32):
        return torch.full(shape or (2,), rank + 1, dtype=dtype, device=device)

    def ones():
        return [mine(1) for _ in range(size)]

    def after(call, tensor, *args):
        call(tensor, *args)
        return tensor.tolist()

    def parts_after(call, length, given):
        parts = [torch.empty(length, device=device) for _ in range(size)]
        call(parts, given)
        return torch.cat(parts).tolist()

    share = torch.empty(1, device=device)
    twice, each = torch.empty(size * 2, device=device), torch.empty(size, device=device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64):
        assert after(torch_dist.all_reduce, mine(dtype=dtype)) == [3, 3]
    assert after(torch_dist.all_reduce, mine(dtype=torch.bool)) == [True, True]
    assert after(torch_dist.all_reduce, mine(), torch_dist.ReduceOp.MAX) == [2, 2]
    assert after(torch_dist.broadcast, mine(), 1) == [2, 2]
    reduced = after(torch_dist.reduce, mine(), 0)
    assert rank or reduced == [3, 3]
    assert parts_after(torch_dist.all_gather, 2, mine()) == [1, 1, 2, 2]
    assert after(torch_dist.all_gather_into_tensor, twice, mine()) == [1, 1, 2, 2]
    assert after(torch_dist.reduce_scatter_tensor, share, mine(size)) == [3]
    assert after(torch_dist.reduce_scatter, share, ones()) == [3]
    assert parts_after(torch_dist.all_to_all, 1, ones()) == [1, 2]
    assert after(torch_dist.all_to_all_single, each, mine(size)) == [1, 2]
    parts = [torch.empty(2, device=device) for _ in range(size)] if rank == 0 else None
    torch_dist.gather(mine(), parts)
    assert rank or torch.stack(parts).tolist() == [[1, 1], [2, 2]]
    assert after(torch_dist.scatter, share, ones() if rank == 0 else None) == [1]
    tensor = mine()
    works = torch_dist.batch_isend_irecv(
        [
            torch_dist.P2POp(torch_dist.isend, mine(), (rank + 1) % size),
            torch_dist.P2POp(torch_dist.irecv, tensor, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    assert tensor.tolist() == [2 - rank, 2 - rank]
    tensor = mine()
    work = torch_dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [6, 6]
    torch_dist.barrier()
    objects = [None] * size
    torch_dist.all_gather_object(objects, dict(rank=rank))
    assert objects == [dict(rank=0), dict(rank=1)]
    listed = [f'of {rank}']
    torch_dist.broadcast_object_list(listed, 1)
    assert listed == ['of 1']
    tensor = mine()
    torch_dist.all_reduce(tensor, group=torch_dist.new_group([0, 1]))
    assert tensor.tolist() == [3, 3]
    assert str(tensor.device) == f'{name}:{rank}'
    model = torch.nn.parallel.DistributedDataParallel(
        nn.Linear(2, 1, bias=False).to(device), device_ids=[rank], find_unused_parameters=True
    )
    model(mine(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
    label, vendor = name.upper(), backend.upper()
    says = refused(torch_dist.all_reduce, torch.ones(1))
    assert 'No backend type associated with device type cpu' in says
    says = refused(torch_dist.all_gather, [torch.ones(2)] * size, mine())
    assert f'Tensors must be {label} and dense' in says
    assert 'contiguous' in refused(torch_dist.all_reduce, mine(2, 3).t())
    odd = mine(dtype=torch.uint8).view(torch.float8_e5m2fnuz)
    says = refused(torch_dist.broadcast, odd, 0)
    assert says == f'Unsupported data type for {vendor} process group'
    double = 'HCCL allreduce: Unsupported data type' if name == 'npu' else 'accepted'
    assert double in refused(torch_dist.all_reduce, mine(dtype=torch.float64))
    integers = mine(dtype=torch.int32)
    says = refused(torch_dist.all_reduce, integers, torch_dist.ReduceOp.BAND)
    assert says == f'Cannot use ReduceOp.BAND with {vendor}'
    says = refused(torch_dist.all_reduce, mine(), torch_dist.ReduceOp.AVG)
    assert says == ('Cannot use ReduceOp.AVG with CNCL' if name == 'mlu' else 'accepted')
    says = refused(torch_dist.recv, mine())
    assert says == f'ProcessGroup{vendor} does not support recv'
    # PyTorch 2.14 says it in other words.
    says = refused(torch_dist.monitored_barrier)
    assert re.search('only implemented for GLOO|a CPU-capable backend', says)
    torch_dist.destroy_process_group()


@pytest.mark.parametrize('name', ['npu', 'mlu', 'zeta'])
def test_collectives(name):
    run_native(name, check_collectives, 2, name, CARDS[name][1])


@pytest.mark.parametrize('device', ['npu', 'mlu'])
@in_ranks()
def test_offers_what_the_vendor_lists(device):
    """But for some of what its source lists as public."""
    listed = vars(vendor_names)[device.upper()].split()
    missing = {each for each in listed if not hasattr(getattr(torch, device), each)}
    assert missing
    assert missing <= set(vendor_names.LEFT_OUT.split())


@in_ranks(**job_of('npu', 0))
def test_parameters_are_those_of_torch_npu():
    """Parameters and defaults of the functions of ``torch.npu``."""
    found = {}
    for line in vendor_names.NPU_LINES:
        name, _, source = line.partition('(')
        function = getattr(torch.npu, name, None)
        if function is None or not source:
            continue
        try:
            has = describe(function)
        except ValueError:  # compiled, without parameters
            continue
        if has != parameters_of(source[:-1], {}):
            found[name] = str(has)
    assert found == {}


# what the package sends ------------------------------------------------------------------------


def sample(rank, number, device):
    """A sample with a small tensor, a large one, an array and plain values."""
    return dict(
        rank=rank,
        number=number,
        text=f'{rank}/{number}',
        array=np.full(3, rank, np.int16),
        small=torch.full((2,), float(rank), device=device),
        large=torch.full((100_000,), float(number), device=device),
    )


def check_messages(name, made_by, backend):
    """Everything of ours that sends, in a group that ``made_by`` started."""
    accelerator = dict(type=name, package=CARDS[name][0])
    if made_by == 'us':
        context = init_device('pytorch', accelerator, forced_backend=backend or 'auto')
    else:
        torch_dist.init_process_group(backend)
        context = init_device('pytorch', accelerator)
    rank, size = context.env.rank, context.env.world_size
    device = context.device
    mmdevplug.patch_mmengine(context.accelerator)
    by_host = name == 'zeta' or backend == 'cpu:gloo,npu:hccl'
    place = 'cpu' if by_host else f'{name}:{rank}'
    assert str(group_device()) == place
    assert backends.takes_tensors(context.accelerator, context.backend)
    assert gather_json(dict(rank=rank)) == [dict(rank=0), dict(rank=1)]
    mine = [sample(rank, number, device) for number in range(3 * rank + 1)]
    for where, expected in ((None, f'{name}:{rank}'), ('cpu', 'cpu')):
        pool = gather_samples(mine, device=where)
        slices = balance_samples(mine, device=where)
        exact, left = balance_samples(mine, 2, device=where)
        assert [each['text'] for each in pool] == ['0/0', '1/0', '1/1', '1/2', '1/3']
        assert [each['large'].mean().item() for each in pool] == [0, 0, 1, 2, 3]
        assert [int(each['array'][0]) for each in pool] == [0, 1, 1, 1, 1]
        assert {str(each.device) for each in tensors_in([pool, slices, exact, left])} == {expected}
        assert [each['text'] for each in slices] == [['0/0', '1/0', '1/1'], ['1/2', '1/3']][rank]
        assert (len(exact), len(left)) == (2, rank)
    sampler = DynamicSampler(
        lambda: [dict(value=torch.full((1,), 10.0 * rank, device=device), ok=True)] * (rank + 1),
        lambda drawn: drawn['ok'],
        4,
    )
    drawn = next(iter(sampler))['value']
    assert (str(drawn.device), len(drawn)) == (f'{name}:{rank}', 2)

    alone = [torch_dist.new_group([0, 1]), torch_dist.new_group([0, 1], backend='gloo')]
    found = [(str(group_device(group)), gather_json(rank, group)) for group in alone]
    assert found == [(place, [0, 1]), ('cpu', [0, 1])]

    tensors = [torch.full((3,), rank + 1.0), torch.full((2,), rank + 1, device=device)]
    broadcast_tensors(tensors, context.accelerator)
    assert [tensor.tolist() for tensor in tensors] == [[1, 1, 1], [1, 1]]
    layers = nn.BatchNorm1d(2).to(device)
    layers.running_mean.fill_(rank)
    check_same_model(layers)
    buffers = RankBuffers(SimpleNamespace(model=layers, hooks=[])).state_dict()
    # Those of the first are saved as weights: mean, variance, batches.
    expected = [[rank, rank], [1, 1], 0] if rank else []
    assert [each.tolist() for each in buffers] == expected
    assert group_by_host(gather_json(host_name())) == [[0, 1]]
    settled = refused(FinitePolicy(True).stop, [f'weight of {rank}'])
    assert settled.startswith('gradients are not finite')

    # MMEngine's own messages
    host = torch.tensor([rank + 1.0])
    mmengine_dist.all_reduce(host)
    assert (str(host.device), host.item()) == ('cpu', 3)
    objects = mmengine_dist.all_gather_object(dict(rank=rank))
    assert objects == [dict(rank=0), dict(rank=1)]
    listed = [f'of {rank}', rank]
    mmengine_dist.broadcast_object_list(listed, 1)
    assert listed == ['of 1', 1]
    gathered = mmengine_dist.gather_object(rank)
    assert rank or gathered == [0, 1]
    seeds = gather_json(mmengine_dist.sync_random_seed())
    assert seeds[0] == seeds[1]
    for where in ('cpu', 'gpu'):
        results = mmengine_dist.collect_results([f'{rank}a', f'{rank}b'], 2 * size, where)
        assert results == (None if rank else ['0a', '1a', '0b', '1b'])
    torch_dist.destroy_process_group()


def share_a_card(masks, uuids=None, **options):
    os.environ['ASCEND_RT_VISIBLE_DEVICES'] = masks[int(os.environ['RANK'])]
    torch.npu.device_count = lambda: 1
    if uuids is not None:
        uuid = uuids[int(os.environ['RANK'])]
        torch.npu.get_device_properties = lambda device: SimpleNamespace(uuid=uuid, total_memory=1)
    return str(init_device('pytorch', 'npu', timeout=60, **options).device)


@pytest.mark.parametrize(
    ('masks', 'uuids', 'refused_by_all'),
    [
        (['0', '0'], None, True),
        (['3', '1'], None, False),
        (['3', '1'], ['GPU-a', 'GPU-a'], True),
        # As Slurm's tasks may see their devices.
        (['0', '0'], ['GPU-a', 'GPU-b'], False),
    ],
)
def test_two_ranks_on_one_card_are_refused(masks, uuids, refused_by_all):
    if not refused_by_all:
        assert run_native('npu', share_a_card, 2, masks, uuids) == ['npu:0', 'npu:0']
        return
    with pytest.raises(RanksFailed) as raised:
        run_native('npu', share_a_card, 2, masks, uuids, together=True)
    assert sorted(kind for kind, _, _ in raised.value.errors.values()) == [
        'LaunchError', 'RankFailedError',
    ]  # fmt: skip
    for _, message, _ in raised.value.errors.values():
        assert "would both use npu:0, which backend 'hccl' refuses: LOCAL_RANK=" in message
        assert f"ASCEND_RT_VISIBLE_DEVICES='{masks[0]}'" in message or masks[0] != masks[1]
        assert "over gloo: accelerator=dict(type='npu', backend='gloo')" in message


def test_two_ranks_share_a_card_over_gloo():
    found = run_native('npu', partial(share_a_card, forced_backend='gloo'), 2, ['0', '0'])
    assert found == ['npu:0', 'npu:0']


def test_a_group_without_host_tensors_is_refused():
    with pytest.raises(RanksFailed, match="Start it with init_process_group.'cpu:gloo,zeta:zccl"):
        run_native('zeta', check_messages, 2, 'zeta', 'somebody', 'zccl')


@pytest.mark.parametrize(
    ('name', 'made_by', 'backend'),
    [
        ('npu', 'us', None),
        ('npu', 'us', 'cpu:gloo,npu:hccl'),
        ('zeta', 'us', None),
        ('zeta', 'somebody', 'cpu:gloo,zeta:zccl'),
    ],
)
def test_messages_travel_where_the_backend_takes_them(name, made_by, backend):
    run_native(name, check_messages, 2, name, made_by, backend)


def average_gradients(backend):
    """The gradient of each rank, how it was averaged, and what was said about that."""
    told = []
    backends.log_warning = told.append
    context = init_device('pytorch', 'zeta', forced_backend=backend, timeout=60)
    torch.manual_seed(0)
    model = mmdevplug.DeviceDistributedDataParallel(nn.Linear(3, 1))
    inputs = torch.full((2, 3), context.env.rank + 1.0).to(context.device)
    model(inputs).sum().backward()
    return (
        model.module.weight.grad.cpu().tolist(),
        torch_dist.get_backend(model.process_group),
        told,
    )


def test_a_backend_without_futures_averages_through_the_host():
    environ = dict(NATIVE_WITHOUT_FUTURES='1')
    for grads, backend, (told,) in run_native(
        'zeta', average_gradients, 2, 'zccl', environ=environ
    ):
        assert (grads, backend) == ([[3.0, 3.0, 3.0]], 'staged')
        assert 'zccl' in told
        assert 'has no futures' in told
        assert told.endswith('gradients are averaged through the host.')
    expected = ([[3.0, 3.0, 3.0]], 'cpu:gloo,zeta:zccl', [])
    assert run_native('zeta', average_gradients, 2, 'zccl') == [expected] * 2
