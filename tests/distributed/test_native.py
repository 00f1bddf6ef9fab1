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
from tests.native import CARDS, STANDINS, needs_native, run_native
from tests.ranks import RanksFailed
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


def carry(name, backend):
    """Every collective once; what they gave, as lists."""
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
    got = {
        str(dtype): after(torch_dist.all_reduce, mine(dtype=dtype))
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool)
    }
    got['max'] = after(torch_dist.all_reduce, mine(), torch_dist.ReduceOp.MAX)
    got['broadcast'] = after(torch_dist.broadcast, mine(), 1)
    got['reduce'] = after(torch_dist.reduce, mine(), 0)
    got['all_gather'] = parts_after(torch_dist.all_gather, 2, mine())
    got['all_gather_into_tensor'] = after(torch_dist.all_gather_into_tensor, twice, mine())
    got['reduce_scatter_tensor'] = after(torch_dist.reduce_scatter_tensor, share, mine(size))
    got['reduce_scatter'] = after(torch_dist.reduce_scatter, share, ones())
    got['all_to_all'] = parts_after(torch_dist.all_to_all, 1, ones())
    got['all_to_all_single'] = after(torch_dist.all_to_all_single, each, mine(size))
    parts = [torch.empty(2, device=device) for _ in range(size)] if rank == 0 else None
    torch_dist.gather(mine(), parts)
    got['gather'] = torch.stack(parts).tolist() if rank == 0 else 'elsewhere'
    got['scatter'] = after(torch_dist.scatter, share, ones() if rank == 0 else None)
    tensor = mine()
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
        nn.Linear(2, 1, bias=False).to(device), device_ids=[rank], find_unused_parameters=True
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


def other_parameters():
    """Functions of ``torch.npu`` whose parameters or defaults are not those of torch_npu."""
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
    return found


def test_parameters_are_those_of_torch_npu():
    assert run_native('npu', other_parameters, 0) == [{}]


@pytest.mark.parametrize('name', ['npu', 'mlu', 'zeta'])
def test_collectives(name):
    ranks = run_native(name, carry, 2, name, CARDS[name][1])
    for rank, got in enumerate(ranks):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64):
            assert got[str(dtype)] == [3, 3]
        assert got['torch.bool'] == [True, True]
        assert got['max'] == got['broadcast'] == [2, 2]
        assert got['all_gather'] == got['all_gather_into_tensor'] == [1, 1, 2, 2]
        assert got['reduce_scatter_tensor'] == got['reduce_scatter'] == [3]
        assert got['all_to_all'] == got['all_to_all_single'] == [1, 2]
        assert got['scatter'] == [1]
        assert rank or got['reduce'] == [3, 3]
        assert got['gather'] == ('elsewhere' if rank else [[1, 1], [2, 2]])
        assert got['p2p'] == [2 - rank, 2 - rank]
        assert got['future'] == [6, 6]
        assert got['objects'] == [dict(rank=0), dict(rank=1)]
        assert got['object_list'] == ['of 1']
        assert got['pair'] == [3, 3]
        assert got['ddp'] == [[1.5, 1.5]]
        assert got['placed'] == f'{name}:{rank}'
        label, backend = name.upper(), CARDS[name][1].upper()
        says = got['refused']
        assert 'No backend type associated with device type cpu' in says['host']
        assert f'Tensors must be {label} and dense' in says['host_in_list']
        assert 'contiguous' in says['layout']
        assert says['dtype'] == f'Unsupported data type for {backend} process group'
        double = 'HCCL allreduce: Unsupported data type' if name == 'npu' else 'accepted'
        assert double in says['double']
        assert says['bitwise'] == f'Cannot use ReduceOp.BAND with {backend}'
        assert says['average'] == (
            'Cannot use ReduceOp.AVG with CNCL' if name == 'mlu' else 'accepted'
        )
        assert says['anyone'] == f'ProcessGroup{backend} does not support recv'
        # PyTorch 2.14 says it in other words.
        assert re.search('only implemented for GLOO|a CPU-capable backend', says['monitored'])


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


def devices_in(samples):
    return sorted({str(tensor.device) for tensor in tensors_in(samples)})


def send(name, made_by, backend):
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
    got = dict(
        place=str(group_device()),
        takes=backends.takes_tensors(context.accelerator, context.backend),
        json=gather_json(dict(rank=rank)),
    )
    mine = [sample(rank, number, device) for number in range(3 * rank + 1)]
    for where in (None, 'cpu'):
        pool = gather_samples(mine, device=where)
        slices = balance_samples(mine, device=where)
        exact, left = balance_samples(mine, 2, device=where)
        got[f'samples {where}'] = dict(
            pool=[each['text'] for each in pool],
            large=[each['large'].mean().item() for each in pool],
            arrays=[int(each['array'][0]) for each in pool],
            devices=devices_in([pool, slices, exact, left]),
            slices=[each['text'] for each in slices],
            exact=[len(exact), len(left)],
        )
    sampler = DynamicSampler(
        lambda: [dict(value=torch.full((1,), 10.0 * rank, device=device), ok=True)] * (rank + 1),
        lambda drawn: drawn['ok'],
        4,
    )
    drawn = next(iter(sampler))['value']
    got['drawn'] = (str(drawn.device), len(drawn))

    alone = [torch_dist.new_group([0, 1]), torch_dist.new_group([0, 1], backend='gloo')]
    got['groups'] = [(str(group_device(group)), gather_json(rank, group)) for group in alone]

    tensors = [torch.full((3,), rank + 1.0), torch.full((2,), rank + 1, device=device)]
    broadcast_tensors(tensors, context.accelerator)
    got['broadcast'] = [tensor.tolist() for tensor in tensors]
    layers = nn.BatchNorm1d(2).to(device)
    layers.running_mean.fill_(rank)
    check_same_model(layers)
    buffers = RankBuffers(SimpleNamespace(model=layers, hooks=[])).state_dict()
    got['buffers'] = [each.tolist() for each in buffers]
    got['hosts'] = group_by_host(gather_json(host_name()))
    got['settled'] = refused(FinitePolicy(True).stop, [f'weight of {rank}'])

    # MMEngine's own messages
    host = torch.tensor([rank + 1.0])
    mmengine_dist.all_reduce(host)
    got['all_reduce'] = (str(host.device), host.item())
    got['objects'] = mmengine_dist.all_gather_object(dict(rank=rank))
    listed = [f'of {rank}', rank]
    mmengine_dist.broadcast_object_list(listed, 1)
    got['listed'] = listed
    got['gathered'] = mmengine_dist.gather_object(rank)
    got['seed'] = mmengine_dist.sync_random_seed()
    for where in ('cpu', 'gpu'):
        got[f'results {where}'] = mmengine_dist.collect_results(
            [f'{rank}a', f'{rank}b'], 2 * size, where
        )
    torch_dist.destroy_process_group()
    return got


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
        run_native('zeta', send, 2, 'zeta', 'somebody', 'zccl')


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
    ranks = run_native(name, send, 2, name, made_by, backend)
    by_host = name == 'zeta' or backend == 'cpu:gloo,npu:hccl'
    assert ranks[0]['seed'] == ranks[1]['seed']
    for rank, got in enumerate(ranks):
        device = f'{name}:{rank}'
        place = 'cpu' if by_host else device
        assert got['place'] == place
        assert got['takes']
        assert got['json'] == [dict(rank=0), dict(rank=1)]
        for where, expected in ((None, device), ('cpu', 'cpu')):
            found = got[f'samples {where}']
            assert found['pool'] == ['0/0', '1/0', '1/1', '1/2', '1/3']
            assert found['large'] == [0, 0, 1, 2, 3]
            assert found['arrays'] == [0, 1, 1, 1, 1]
            assert found['devices'] == [expected]
            assert found['slices'] == [['0/0', '1/0', '1/1'], ['1/2', '1/3']][rank]
            assert found['exact'] == [2, rank]
        assert got['drawn'] == (device, 2)
        assert got['groups'] == [(place, [0, 1]), ('cpu', [0, 1])]
        assert got['broadcast'] == [[1, 1, 1], [1, 1]]
        # Those of the first are saved as weights: mean, variance, batches.
        assert got['buffers'] == ([[rank, rank], [1, 1], 0] if rank else [])
        assert got['hosts'] == [[0, 1]]
        assert got['settled'].startswith('gradients are not finite')
        assert got['all_reduce'] == ('cpu', 3)
        assert got['objects'] == [dict(rank=0), dict(rank=1)]
        assert got['listed'] == ['of 1', 1]
    assert ranks[0]['gathered'] == [0, 1]
    for where in ('cpu', 'gpu'):
        assert ranks[0][f'results {where}'] == ['0a', '1a', '0b', '1b']
        assert ranks[1][f'results {where}'] is None


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
