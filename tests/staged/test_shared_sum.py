"""Large tensors, which the ranks of a host add up in memory that they share."""

import threading
import warnings

import pytest
import torch
from torch import distributed as torch_dist
from torch.distributed import ReduceOp

from mmdevplug.staged import large_sums
from tests.ranks import in_ranks

from .test_collectives import pytestmark, start  # noqa: F401

DEVICES = ['cpu', 'zeta']


def value(rank, number, size=300_000):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(size, generator=generator)


def sums():
    return torch_dist.group.WORLD.sums


@pytest.mark.parametrize('ranks', [2, 4])
@pytest.mark.parametrize('device', DEVICES)
@in_ranks()
def test_averages_arrive_in_whatever_order_they_are_waited_for(device, ranks):
    """Some are waited for by several threads."""
    where = start(device)
    rank = torch_dist.get_rank()
    for turn in range(12):
        tensors = [value(rank, 10 * turn + k).to(where) for k in range(8)]
        works = [torch_dist.all_reduce(t, op=ReduceOp.AVG, async_op=True) for t in tensors]
        if turn % 3 == 1:
            works = works[::-1]
        if turn % 3 == 2:
            futures = [work.get_future() for work in works]
            waiting = [threading.Thread(target=future.wait) for future in futures[::-1]]
            for thread in waiting:
                thread.start()
            for thread in waiting:
                thread.join()
        for work in works:
            work.wait()
        for k, found in enumerate(tensors):
            expected = sum(value(each, 10 * turn + k) for each in range(ranks)) / ranks
            assert (found.cpu() - expected).abs().max() <= 1e-6, (turn, k)
    assert sums().count == 96


@pytest.mark.parametrize('device', DEVICES)
@in_ranks(2)
def test_tensors_of_any_size_take_turns_in_the_same_memory(device):
    where = start(device)
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    tensors = [torch.full((2_000_000,), float(number + rank)).to(where) for number in range(24)]
    works = [torch_dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works[::-1]:
        work.wait()
    total = size * (size - 1) / 2
    assert all((t == size * n + total).all() for n, t in enumerate(tensors))
    large = torch.ones(20_000_000, device=where)  # 80 MB
    torch_dist.all_reduce(large)
    assert (large == size).all()
    # Of 192 MB that were under way.
    assert sum(len(part.memory) for part in sums().parts) <= 64 << 20


@pytest.mark.parametrize('device', DEVICES)
@in_ranks(3)
def test_types_and_strides(device):
    where = start(device)
    size = torch_dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        tensor = torch.full((1024, 1024), torch_dist.get_rank() + 1.0, dtype=dtype)
        # Memory in another order than that of the elements.
        strided = tensor.to(where).t()
        torch_dist.all_reduce(strided, op=ReduceOp.AVG)
        assert (strided.cpu() == (size + 1) / 2).all(), dtype
    assert sums().count == 4


@pytest.mark.parametrize('device', DEVICES)
@in_ranks(2)
def test_an_average_that_is_not_finite_can_leave_everything_as_it_is(device):
    where = start(device)
    group, rank = torch_dist.group.WORLD, torch_dist.get_rank()
    own = torch.full((1_500_000,), float(rank))
    if rank == 1:
        own[7] = float('nan')
    for size in (1_500_000, 500_000, 100):  # in shared memory, in pieces or one, and by a message
        for keeps in (True, False):
            tensor = own[:size].clone().to(where)
            work = group.average(tensor, keeps_nonfinite=keeps)
            work.wait()
            assert not work.finite
            assert tensor[0] == (rank if keeps else 0.5)
            assert bool(tensor[7].isnan()) == (rank == 1 or not keeps)
    assert sums().count == 4


@in_ranks(4)
def test_all_hosts_know_that_an_average_is_not_finite():
    """NaN of the first of two hosts reaches the other by a message."""
    start('cpu')
    rank = torch_dist.get_rank()
    large_sums.host_name = lambda: f'host {rank // 2}'
    tensor = torch.full((500_000,), float(rank))
    if rank == 0:
        tensor[7] = float('nan')
    work = torch_dist.group.WORLD.average(tensor)
    work.wait()
    assert not work.finite
    assert tensor[0] == 1.5
    assert tensor[7].isnan()
    assert sums().count == 1


@in_ranks(2)
def test_ranks_on_different_kinds_of_devices_are_named():
    where = start('zeta')
    rank = torch_dist.get_rank()
    tensor = torch.ones(500_000, device=where if rank else 'cpu')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        torch_dist.all_reduce(tensor)
    assert (tensor.cpu() == 2).all()
    told = [str(each.message) for each in caught if 'different kinds' in str(each.message)]
    assert len(told) == (0 if rank else 1)
    assert all("rank 0 'cpu', rank 1 'zeta'" in line for line in told)


@pytest.mark.parametrize('device', DEVICES)
@in_ranks(2)
def test_no_sum_waits_for_a_later_one(device):
    """Rank 0 has two sums under way before rank 1 starts the second, after a message of rank 0."""
    where = start(device)
    rank = torch_dist.get_rank()
    first, second = (torch.ones(400_000, device=where) for _ in range(2))
    one = torch_dist.all_reduce(first, async_op=True)
    note = torch.zeros(1)
    if rank == 0:
        other = torch_dist.all_reduce(second, async_op=True)
        one.wait()
        torch_dist.send(note, 1)
    else:
        one.wait()
        torch_dist.recv(note, 0)
        other = torch_dist.all_reduce(second, async_op=True)
    other.wait()
    assert first.sum() + second.sum() == 1_600_000


@pytest.mark.parametrize('device', [*DEVICES, 'streams'])
@in_ranks(2)
def test_a_sum_that_a_rank_does_not_wait_for_reaches_the_others(device):
    """Rank 0 waits for a message of rank 1 before it waits for its sum."""
    where = start(device)
    tensor = torch.ones(400_000, device=where)
    work, note = torch_dist.all_reduce(tensor, async_op=True), torch.zeros(1)
    if torch_dist.get_rank() == 0:
        torch_dist.recv(note, 1)
        work.wait()
    else:
        work.wait()
        torch_dist.send(note, 0)
    assert tensor.sum() == 800_000


@pytest.mark.parametrize('device', [*DEVICES, 'streams'])
@in_ranks(2)
def test_asking_whether_a_sum_has_ended_ends(device):
    """It is asked for, and not waited for."""
    where = start(device)
    tensors = [torch.ones(400_000, device=where) for _ in range(3)]
    works = [torch_dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    while not all(work.is_completed() for work in works):
        pass
    torch_dist.barrier()
    assert [tensor.sum() for tensor in tensors] == [800_000] * 3


@pytest.mark.parametrize('average', [False, True])
@in_ranks(2)
def test_copies_of_a_card_with_streams_run_beside_its_program(average):
    """How a sum is copied on a card with streams, and how often the host waits for one."""
    where = start('streams')
    inside, copies, waits = [], [], []
    copy = torch.Tensor.copy_

    class Noted(torch.zeta.stream):
        def __enter__(self):
            inside.append(self.stream)

        def __exit__(self, *error):
            inside.pop()

    def note(to, source, non_blocking=False):
        if to.device != source.device:
            pinned = [each.is_pinned() for each in (to, source) if each.device.type == 'cpu']
            beside = bool(inside) and inside[-1] is not torch.zeta.current_stream()
            copies.append((to.device.type, non_blocking, *pinned, beside))
        return copy(to, source, non_blocking)

    torch.zeta.stream = Noted
    torch.zeta.Stream.synchronize = torch.zeta.synchronize = None  # these wait for the program
    tensor, group = torch.ones(400_000, device=where), torch_dist.group.WORLD
    torch_dist.barrier()
    torch.zeta.Event.synchronize = lambda event: waits.append(event)
    torch.Tensor.copy_, torch.Tensor.cpu = note, None
    work = group.average(tensor) if average else torch_dist.all_reduce(tensor, async_op=True)
    work.wait()
    del torch.Tensor.copy_, torch.Tensor.cpu
    assert copies == [('cpu', True, True, True), ('zeta', True, True, True)]
    assert len(waits) == 2
    assert set(tensor.cpu().tolist()) == {1.0 if average else 2.0}


@in_ranks(2)
def test_a_copy_that_fails_is_told_by_wait():
    """A message whose copy to the host fails after the call."""
    start('streams')
    import native_card

    def fail(self):
        raise RuntimeError('the card is gone')

    native_card.Event.synchronize = fail
    work = torch_dist.all_reduce(torch.ones(4, device='zeta'), async_op=True)
    for wait in (torch_dist.barrier, work.wait):  # a barrier waits for what is under way
        with pytest.raises(RuntimeError, match='all_reduce of .* failed: the card is gone'):
            wait()
    assert work.is_completed()
