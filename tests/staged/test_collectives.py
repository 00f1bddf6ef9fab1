"""Collectives of the backend ``staged`` on devices that gloo refuses, checked by hand."""

import os
import re
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as torch_dist
from torch.distributed import ReduceOp

import mmdevplug.staged  # noqa: F401
from mmdevplug.staged.host_buffers import HostBuffers
from tests.columns import XLA
from tests.commands import python
from tests.jobs import ROOT, install_card
from tests.ranks import in_ranks

RELEASE = tuple(map(int, torch.__version__.split('.')[:2]))
pytestmark = pytest.mark.skipif(
    RELEASE < (2, 0), reason='the backend is for PyTorch 2.0 and later'
)
DEVICES = ['cpu', 'zeta', 'lazy', XLA]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip
#: What the devices have not.
LACKS = dict(
    xla=(torch.float64,),
    zeta=(torch.complex64,),  # the stand-in's view_as_real() is a copy, to which PyTorch writes
)
MODULES = 'group_base', 'host_buffers', 'reductions', 'staged_group', 'work'
REDUCTIONS = dict(
    SUM=torch.add, PRODUCT=torch.mul, MIN=torch.minimum, MAX=torch.maximum,
    BAND=torch.bitwise_and, BOR=torch.bitwise_or, BXOR=torch.bitwise_xor,
)  # fmt: skip


def add_streams():
    """Give the card streams and events, with which copies go on while its program does."""
    sys.path.insert(0, str(ROOT / 'standins' / 'native'))
    import native_card

    stream = native_card.Stream()
    torch.zeta.Event, torch.zeta.Stream = native_card.Event, native_card.Stream
    torch.zeta.stream = native_card.StreamContext
    torch.zeta.current_stream = torch.zeta.default_stream = lambda device=None: stream


def start(device, timeout=60):
    """Make the group of all ranks; returns this rank's device.

    ``'streams'`` is a card with streams, ``'gloo'`` the CPU with PyTorch's own backend.
    """
    backend, streams = 'gloo' if device == 'gloo' else 'staged', device == 'streams'
    device = dict(streams='zeta', gloo='cpu').get(device, device)
    install_card(device)
    if streams:
        add_streams()
    if device == 'xla':
        import torch_xla  # noqa: F401
    if device == 'lazy':
        from torch._lazy import ts_backend

        ts_backend.init()
    torch_dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    index = torch_dist.get_rank() if device in ('zeta', 'xla') else 0
    return torch.device('cpu') if device == 'cpu' else torch.device(device, index)


def values(rank, dtype, shape=(3, 4)):
    """Small integers, whose sums and products are exact in every type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


def on_host(value):
    if isinstance(value, (list, tuple)):
        return [on_host(each) for each in value]
    return value.detach().cpu().clone()


def same(name, found, expected):
    """Assert that a tensor, or each of a list, is the expected one in type and value."""
    found, expected = on_host(found), on_host(expected)
    if not isinstance(found, list):
        found, expected = [found], [expected]
    assert len(found) == len(expected), name
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), (name, one, other)


def types_of(device, *more):
    return [each for each in (*DTYPES, *more) if each not in LACKS.get(device, ())]


@pytest.mark.parametrize(
    ('device', 'ranks'),
    [
        ('cpu', 2),
        ('zeta', 2),
        ('zeta', 3),
        ('lazy', 2),
        pytest.param('xla', 2, marks=pytest.mark.xla),
    ],
)
@in_ranks()
def test_what_is_moved_arrives(device, ranks):
    where, rank = start(device), torch_dist.get_rank()
    types = types_of(device, torch.complex64)
    assert len(types) >= 10
    for dtype in types:
        of = [values(each, dtype) for each in range(ranks)]
        own = of[rank].to(where)

        def compare(name, result, expected, dtype=dtype):
            same(f'{name} {dtype}', result, expected)

        def empty(count=1, own=own):
            return torch.zeros((3 * count, 4), dtype=own.dtype, device=own.device)

        tensor = own.clone()
        torch_dist.broadcast(tensor, src=ranks - 1)
        compare('broadcast', tensor, of[-1])
        parts = [empty() for _ in range(ranks)]
        torch_dist.all_gather(parts, own)
        compare('all_gather', parts, of)
        whole = empty(ranks)
        torch_dist.all_gather_into_tensor(whole, own)
        compare('all_gather_into_tensor', whole, torch.cat(of))
        parts = [empty() for _ in range(ranks)] if rank == 0 else None
        torch_dist.gather(own, parts, dst=0)
        compare('gather', parts or [], of if rank == 0 else [])
        tensor = empty()
        given = [each.to(where) for each in of] if rank == 1 else None
        torch_dist.scatter(tensor, given, src=1)
        compare('scatter', tensor, of[rank])
        # The same number of rows to all, then another number to each.
        whole = empty(ranks)
        torch_dist.all_to_all_single(whole, torch.cat([own] * ranks))
        compare('all_to_all_single', whole, torch.cat(of))
        counts = [each + 1 for each in range(ranks)]
        source = torch.cat([own[:1]] * sum(counts))
        whole = torch.cat([own[:1]] * (ranks * counts[rank]))
        torch_dist.all_to_all_single(whole, source, [counts[rank]] * ranks, counts)
        compare('uneven', whole, torch.cat([each[:1] for each in of for _ in range(counts[rank])]))
        parts = [empty() for _ in range(ranks)]
        torch_dist.all_to_all(parts, [own + 0 * own if dtype != torch.bool else own] * ranks)
        compare('all_to_all', parts, of)
        tensor = empty()
        peer = rank ^ 1
        if peer < ranks:
            work = torch_dist.irecv(tensor, src=peer, tag=3)
            torch_dist.isend(own, dst=peer, tag=3).wait()
            work.wait()
            compare('send and recv', tensor, of[peer])


@pytest.mark.parametrize('device', DEVICES)
@in_ranks(2)
def test_reductions(device):
    where, rank = start(device), torch_dist.get_rank()
    types = types_of(device)
    assert len(types) >= 9
    for dtype in types:
        for name, function in REDUCTIONS.items():
            if name[0] == 'B' and dtype.is_floating_point:
                continue
            op = getattr(ReduceOp, name)
            wide = torch.int32 if dtype == torch.bool else dtype
            of = [values(each, dtype, (4, 4)) for each in range(2)]
            total = function(of[0].to(wide), of[1].to(wide)).to(dtype)
            own = of[rank].to(where)
            told = f'{name} {dtype}'

            tensor = own.clone()
            torch_dist.all_reduce(tensor, op)
            same(f'all_reduce {told}', tensor, total)
            tensor = own.clone()
            torch_dist.reduce(tensor, dst=1, op=op)
            same(f'reduce {told}', tensor, total if rank == 1 else of[rank])
            share = total[2 * rank : 2 * rank + 2]
            tensor = own[:2].clone()
            torch_dist.reduce_scatter_tensor(tensor, own, op)
            same(f'reduce_scatter_tensor {told}', tensor, share)
            tensor = own[:2].clone()
            torch_dist.reduce_scatter(tensor, [own[:2], own[2:]], op)
            same(f'reduce_scatter {told}', tensor, share)
    # Large enough to be added up in shared memory.
    tensor = torch.full((512, 1025), 1.0 + rank, device=where)
    torch_dist.all_reduce(tensor)
    same('large', tensor, torch.full((512, 1025), 3.0))
    for dtype, mean in (torch.float32, 2.5), (torch.int64, 2):
        tensor = torch.full((4,), 2 + rank, dtype=dtype, device=where)
        torch_dist.all_reduce(tensor, ReduceOp.AVG)
        same('average', tensor, torch.full((4,), mean, dtype=dtype))
    expected = torch.full((4,), 40_000.0, dtype=torch.float16)  # twice that is infinite
    tensor = expected.to(where)
    torch_dist.all_reduce(tensor, ReduceOp.AVG)
    same('average of halves', tensor, expected)


@pytest.mark.parametrize('device', ['cpu', 'zeta', XLA])
@in_ranks(2)
def test_strides_scalars_and_nothing(device):
    """Tensors that are no plain block of memory, in each direction."""
    where, rank = start(device), torch_dist.get_rank()
    base = torch.zeros(4, 6, device=where)
    view = base.t()[1:5:2]  # strided both ways
    view.copy_(values(rank, torch.float32, (2, 4)))
    torch_dist.all_reduce(view)
    total = sum(values(each, torch.float32, (2, 4)) for each in range(2))
    same('strided', view, total)
    expected = torch.zeros(4, 6)
    expected.t()[1:5:2].copy_(total)
    same('around it', base, expected)
    scalar = torch.tensor(float(rank + 1), device=where)
    torch_dist.all_reduce(scalar)
    same('no dimension', scalar, torch.tensor(3.0))
    nothing = torch.zeros(0, 3, device=where)
    torch_dist.all_reduce(nothing)
    torch_dist.broadcast(nothing, src=0)
    parts = [torch.zeros(0, 3, device=where) for _ in range(2)]
    torch_dist.all_gather(parts, nothing)
    same('empty', parts, [torch.zeros(0, 3)] * 2)
    weight = torch.nn.Parameter(torch.full((3,), rank + 1.0, device=where))
    torch_dist.all_reduce(weight.data)
    with torch.no_grad():
        torch_dist.broadcast(weight, src=0)
    same('a parameter', weight, torch.full((3,), 3.0))
    repeated = torch.zeros(1, 3, device=where).expand(4, 3)
    torch_dist.all_gather([torch.zeros(4, 3, device=where) for _ in range(2)], repeated)
    if device != 'xla':  # whose expanded tensors have memory of their own
        with pytest.raises(RuntimeError, match=r'all_reduce.*share memory.*clone'):
            torch_dist.all_reduce(repeated)


@pytest.mark.parametrize('device', DEVICES)
@in_ranks(2)
def test_works_groups_objects_and_futures(device):
    where, rank = start(device), torch_dist.get_rank()
    later = [torch.full((1000,), float(rank + k), device=where) for k in range(5)]
    works = [torch_dist.all_reduce(tensor, async_op=True) for tensor in later]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
    same('async', later, [torch.full((1000,), 2.0 * k + 1) for k in range(5)])

    # A message that arrives after a collective which began later.
    message, tensor = torch.zeros(2, device=where), torch.ones(2, device=where)
    if rank == 0:
        received = torch_dist.irecv(message, src=1)
        future = received.get_future()
        torch_dist.all_reduce(tensor)
        torch_dist.send(tensor, dst=1)
        future.wait()
    else:
        torch_dist.all_reduce(tensor)
        time.sleep(0.2)  # longer than a thread waits at a time
        torch_dist.recv(message, src=0)
        torch_dist.send(tensor + message, dst=0)
    same('messages', message, torch.full((2,), 4.0 if rank == 0 else 2.0))

    tensor = torch.ones(3, device=where)
    future = torch_dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: [each * 2 for each in done.value()]).wait()
    same('future', doubled[0], torch.full((3,), 4.0))

    alone = torch_dist.new_group([1])
    if rank == 1:
        tensor = torch.ones(2, device=where)
        torch_dist.all_reduce(tensor, group=alone)
        same('group of one', tensor, torch.ones(2))
    both = torch_dist.new_group([0, 1], timeout=timedelta(seconds=30))
    tensor = torch.ones(2, device=where)
    torch_dist.all_reduce(tensor, group=both)
    same('group', tensor, torch.full((2,), 2.0))

    objects = [None, None]
    torch_dist.all_gather_object(objects, dict(rank=rank))
    assert objects == [dict(rank=0), dict(rank=1)]
    shared = [dict(rank=rank), 'text']
    torch_dist.broadcast_object_list(shared, src=1)
    assert shared == [dict(rank=1), 'text']

    with torch_dist._coalescing_manager(device=where, async_ops=True) as manager:
        tensors = [torch.ones(2, device=where) * (k + rank) for k in range(3)]
        for tensor in tensors:
            torch_dist.all_reduce(tensor)
    manager.wait()
    same('coalesced', tensors, [torch.full((2,), 2.0 * k + 1) for k in range(3)])
    own = torch.full((2,), float(rank), device=where)
    works = torch_dist.batch_isend_irecv(
        [
            torch_dist.P2POp(torch_dist.isend, own, 1 - rank),
            torch_dist.P2POp(torch_dist.irecv, message, 1 - rank),
        ]
    )
    for work in works:
        work.wait()
    same('batched', message, torch.full((2,), 1.0 - rank))
    torch_dist.group.WORLD.barrier().wait()
    torch_dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    assert torch_dist.get_backend() == 'staged'
    torch_dist.destroy_process_group()


before_2_13 = pytest.mark.skipif(
    RELEASE < (2, 13),
    reason='functional collectives of older releases have no kernel for PrivateUse1',
)


@pytest.mark.skipif(RELEASE < (2, 5), reason='torch.distributed.tensor came with PyTorch 2.5')
@pytest.mark.parametrize('device', ['cpu', pytest.param('zeta', marks=before_2_13)])
@in_ranks(2)
def test_functional_collectives_and_dtensor(device):
    """PyTorch's functional collectives and DTensor look groups up in C++."""
    from torch.distributed import _functional_collectives as functions
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    where, rank = start(device), torch_dist.get_rank()
    group = torch_dist.group.WORLD
    own = torch.full((2, 2), rank + 1.0, device=where)
    same('sum', functions.all_reduce(own, 'sum', group) + 0, torch.full((2, 2), 3.0))
    gathered = torch.tensor([[1.0, 1], [1, 1], [2, 2], [2, 2]])
    same('gather', functions.all_gather_tensor(own, 0, group) + 0, gathered)
    scattered = functions.reduce_scatter_tensor(own, 'sum', 0, group)
    same('scatter', scattered + 0, torch.full((1, 2), 3.0))
    mesh = init_device_mesh(where.type, (2,))
    whole = torch.arange(8.0).view(4, 2)
    sharded = distribute_tensor(whole.to(where), mesh, [Shard(0)])
    same('its shard', sharded.to_local(), whole[2 * rank : 2 * rank + 2])
    same('all of it', sharded.full_tensor(), whole)


@in_ranks(2)
def test_refusals_name_rank_collective_and_shapes():
    where, rank = start('zeta', timeout=3), torch_dist.get_rank()
    near, far = torch.ones(2), torch.ones(2, device=where)

    def refuse(words, collective, *args):
        with pytest.raises(RuntimeError, match=words):
            collective(*args)

    refuse(
        rf'^rank {rank} of 2: all_gather of \[2\] torch.float32 on cpu, \[2\] torch.float32 on '
        rf'{where}: expected tensors of one device, got cpu, {where}\. Move them',
        *(torch_dist.all_gather, [near, near.clone()], far),
    )
    refuse('expected 2 tensors, one for each rank, got 1', torch_dist.all_gather, [far + 0], far)
    three = torch.ones(3, device=where)
    refuse('3 rows cannot be divided by 2 ranks', torch_dist.all_gather_into_tensor, three, far)
    uneven = r'expected the rows of 2 ranks, 2 together, got \[1, 2\]'
    refuse(uneven, torch_dist.all_to_all_single, far + 0, far, [1, 2], [1, 1])
    refuse('PREMUL_SUM', torch_dist.all_reduce, far, torch_dist._make_nccl_premul_sum(0.5))
    child = os.fork()
    if child == 0:
        try:
            torch_dist.all_reduce(far)
        except RuntimeError as error:
            os._exit(7 if 'was forked from' in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    torch_dist.group.WORLD.barrier().wait()
    if rank == 0:
        alone = r'^rank 0 of 2: all_reduce of \[2\] torch.float32 on zeta:0 failed'
        refuse(alone, torch_dist.all_reduce, far)


REGISTERED = """
from torch import distributed as torch_dist

assert 'staged' not in torch_dist.Backend.backend_list
defaults = dict(torch_dist.Backend.default_device_backend_map)
import mmdevplug.staged

mmdevplug.staged.register()  # a second time
assert torch_dist.Backend.default_device_backend_map == defaults
print(torch_dist.Backend.backend_list.count('staged'))
"""


def test_the_import_registers_and_does_nothing_else():
    done = python('-c', REGISTERED, mmengine=False)
    assert done.stdout.strip() == '1'


WITHOUT_MMENGINE = """
import sys
import time

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == 'mmengine':
            raise ModuleNotFoundError("No module named 'mmengine'", name='mmengine')

sys.meta_path.insert(0, Hidden())
import mmdevplug.staged
import torch
from torch import distributed as torch_dist

torch_dist.init_process_group('staged', init_method='file://' + sys.argv[1], rank=0, world_size=1)
tensor = torch.ones(2)
torch_dist.all_reduce(tensor)
assert tensor.tolist() == [1, 1]
print(sorted(name for name in sys.modules if name.startswith('mmdevplug')))
import mmdevplug
mmdevplug.DeviceRunner
"""


def test_it_needs_nothing_of_mmengine(tmp_path):
    done = python('-c', WITHOUT_MMENGINE, tmp_path / 'store', mmengine=False)
    own = ['', '.errors', '.staged', *(f'.staged.{name}' for name in MODULES)]
    own += ['.utils', '.utils.annotations', '.utils.host', '.utils.signals']
    own += ['.utils.torch_compat', '.version']
    lines = [line for line in done.stdout.splitlines() if '[Gloo]' not in line]  # says 2.9
    assert lines == [str([f'mmdevplug{name}' for name in own])]
    last = done.stderr.strip().splitlines()[-1]
    assert 'ModuleNotFoundError: mmdevplug extends MMEngine, and ' in last


@pytest.mark.parametrize('device', ['cpu', 'zeta'])
@in_ranks(2)
def test_a_collective_that_has_ended_holds_no_tensors(device):
    where = start(device)

    def resident():
        with open('/proc/self/statm', encoding='ascii') as file:
            return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')

    def turn(count):
        for _ in range(count):
            for dtype in (torch.int64, torch.float32):  # by messages, and in shared memory
                tensor = torch.ones(1 << 19, dtype=dtype, device=where)
                torch_dist.all_reduce(tensor)
                torch_dist.all_reduce(tensor, async_op=True).get_future().wait()
                torch_dist.all_reduce(tensor, async_op=True)
        torch_dist.barrier()

    turn(10)
    before = resident()
    turn(40)
    assert resident() - before < 80 << 20  # of 240 MB in tensors that are gone


@in_ranks(2)
def test_a_destroyed_group_keeps_no_connections():
    """A rank that has destroyed its group is missed at once."""
    start('cpu')
    torch_dist.all_reduce(torch.ones(3))
    torch_dist.barrier()
    if torch_dist.get_rank() == 1:
        torch_dist.destroy_process_group()
        time.sleep(8)
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match='all_reduce'):
        torch_dist.all_reduce(torch.ones(3))
    assert time.monotonic() - began < 6


@in_ranks(3)
def test_a_rank_that_is_late_is_named():
    torch_dist.init_process_group('staged', timeout=timedelta(seconds=4))
    torch_dist.barrier()
    if torch_dist.get_rank() == 1:
        time.sleep(8)
        return
    work = torch_dist.all_reduce(torch.ones(3), async_op=True)
    if torch_dist.get_rank() == 0:  # another one than rank 2 has begun last
        torch_dist.all_reduce(torch.ones(4), async_op=True)
    with pytest.raises(RuntimeError) as raised:
        work.wait()
    told = str(raised.value)
    assert re.search(r'rank 1 \(process \d+\) did not wait for it', told), told
    assert 'rank 2 (' not in told
    assert 'rank 0 (' not in told


@in_ranks(2)
def test_the_next_message_waits_for_one_that_waits_for_its_copy():
    device, read = start('cpu', timeout=10), HostBuffers.read
    delay = 0.2 if torch.distributed.get_rank() == 0 else 0.0

    def read_late(buffers, tensor, later=False):
        if later:
            event = type('Event', (), dict(synchronize=lambda self: time.sleep(delay)))
            buffers.copied.append(event())
        return read(buffers, tensor, later)

    HostBuffers.read = read_late
    added = torch.full((5,), 1.0 + torch_dist.get_rank(), device=device)
    work = torch_dist.all_reduce(added, async_op=True)
    time.sleep(0.05)  # a thread waits for the copy now
    sent = torch.full((3,), torch_dist.get_rank(), device=device)
    torch_dist.broadcast(sent, 1)
    work.wait()
    assert added.tolist() == [3.0] * 5
    assert sent.tolist() == [1] * 3


@in_ranks(2)
def test_what_a_message_reads_is_written_by_no_other_meanwhile():
    start('cpu')
    rank = torch_dist.get_rank()
    own, parts = torch.full((4,), rank + 1.0), [torch.zeros(4), torch.zeros(4)]
    time.sleep(0.5 * rank)
    gathered = torch_dist.all_gather(parts, own, async_op=True)
    received = torch_dist.broadcast(own, src=1, async_op=True)
    assert gathered.is_completed()
    received.wait()
    assert [part[0].item() for part in (*parts, own)] == [1.0, 2.0, 2.0]
