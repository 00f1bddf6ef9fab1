"""Averages on the host: what overlaps with backward, what is shared, what remains afterwards."""

import os
import resource
import signal
import warnings

import numpy as np
import pytest
import torch
from torch import distributed as torch_dist, nn

from benchmarks.hosts import Hosts
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.gradients.ddp_hook import BucketAveraging
from mmdevplug.staged import reductions
from mmdevplug.staged.shared_memory import group_by_host, share_memory
from mmdevplug.utils.host import host_name
from mmdevplug.utils.memory_file import MemoryFile
from tests.columns import XLA, job_of
from tests.gradients.averaging import (
    allocations,
    batch,
    deep,
    gradients,
    net,
    rank,
    shared_sums,
    wrap,
)
from tests.jobs import checkpoint, largest_difference, start, weights_of
from tests.on_hosts import need_hosts, run_on_hosts
from tests.ranks import errors_of_ranks, in_ranks, run_ranks


@in_ranks(2)
def test_buckets_start_during_backward_on_an_eager_device():
    context = start('zeta')
    wrapper = wrap(deep(layers=40), bucket_cap_mb=0.1)
    inputs = batch(0, context.device, 128).requires_grad_(True)
    seen, averaging, average = [], [], BucketAveraging.hook

    def note(self, state, bucket):
        averaging.append(self)
        return average(self, state, bucket)

    def look(gradient):
        # Backward has just one layer left: the first, whose weight's gradient comes after this.
        seen.append(len(averaging[-1]._started))

    BucketAveraging.hook = note
    wrapper(inputs).sum().backward()  # DDP orders its buckets after the first
    inputs.register_hook(look)
    wrapper(inputs).sum().backward()
    (started,), size = seen, 40 * (128 + 1) * 128 * 4
    # The first bucket of DDP has 1 MB, the others have 0.1 MB or a layer more.
    assert started >= (size - (1 << 20)) // (3 * 66_048)


class TwoSegments(nn.Module):
    """One layer in two reentrant checkpoints: its gradient comes in two parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)
        self.rest = nn.Linear(8, 8)

    def forward(self, inputs):
        inputs = inputs.requires_grad_(True)
        hidden = checkpoint(self.shared, inputs, use_reentrant=True)
        return checkpoint(self.shared, self.rest(hidden).tanh(), use_reentrant=True)


def average_of_ranks(step, ranks):
    """The same by hand, in one process."""
    total = {}
    for number in range(ranks):
        module = TwoSegments()
        module(batch(step, 'cpu', number=number)).square().mean().backward()
        for name, parameter in module.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad.numpy() / ranks
    return total


@in_ranks(2)
def test_a_gradient_that_comes_in_parts_is_averaged_whole():
    context = start('zeta')
    wrapper = wrap(TwoSegments(), bucket_cap_mb=1e-4, static_graph=True)
    for step in range(3):
        wrapper.zero_grad()
        wrapper(batch(step, context.device)).square().mean().backward()
        assert largest_difference(gradients(wrapper), average_of_ranks(step, 2)) <= 1e-6


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, inputs, which):
        for index in which:
            inputs = self.parts[index](inputs)
        return inputs


@in_ranks(2)
def test_parameters_that_no_rank_used_are_left_alone():
    context = start('zeta')
    wrapper = wrap(Choosing(), bucket_cap_mb=1e-4, find_unused_parameters=True)
    mine = [[0, 1], [0, 1], [0, 3], [2] if rank() else [0], [0, 1, 2, 3], []]
    of_all = [{0, 1}, {0, 1}, {0, 3}, {0, 2}, {0, 1, 2, 3}, set()]
    for step, (which, expected) in enumerate(zip(mine, of_all)):
        wrapper.zero_grad(set_to_none=True)
        output = wrapper(batch(step, context.device).requires_grad_(True), which)
        output.square().mean().backward()
        there = {name for name, gradient in gradients(wrapper).items() if gradient is not None}
        assert {int(name.split('.')[1]) for name in there} == expected


# shared memory -----------------------------------------------------------------------------------


WIDTH = 512  # 1.06 MB of gradients


def train(accelerator, **options):
    context = start(accelerator)
    wrapper = wrap(net(WIDTH), **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        wrapper(batch(step, context.device, WIDTH)).square().mean().backward()
        optimizer.step()
    return shared_sums(wrapper), weights_of(wrapper.module)


@pytest.mark.parametrize('ranks', [2, 4])
def test_ranks_of_a_host_add_up_in_shared_memory(ranks):
    shared = run_ranks(train, ranks, 'zeta')
    flat = run_ranks(flat_train, ranks, 'zeta')
    for (in_memory, weights), (none, other) in zip(shared, flat):
        assert in_memory > 0 == none
        assert largest_difference(weights, shared[0][1]) == 0
        assert largest_difference(weights, other) <= (0 if ranks == 2 else 1e-6)


def flat_train(accelerator):
    reductions.LEAST_BYTES = float('inf')
    return train(accelerator)


def plain_gradient(number):
    module = net(WIDTH)
    module(torch.full((4, WIDTH), float(number))).sum().backward()
    return module[0].bias.grad.numpy()


@in_ranks(4)
def test_a_group_of_some_ranks_averages_by_itself():
    context = start('zeta')
    pairs = [torch_dist.new_group([0, 2]), torch_dist.new_group([1, 3])]
    wrapper = wrap(net(WIDTH), process_group=pairs[rank() % 2])
    inputs = torch.full((4, WIDTH), float(rank())).to(context.device)
    wrapper(inputs).sum().backward()
    torch_dist.barrier()  # Rank 0 holds the store, and its pair may be done first.
    assert shared_sums(wrapper) > 0
    expected = (plain_gradient(rank() % 2) + plain_gradient(rank() % 2 + 2)) / 2
    np.testing.assert_allclose(gradients(wrapper)['0.bias'], expected, atol=1e-6)


@pytest.mark.long
def test_hosts_with_unlike_numbers_of_ranks():
    """Two ranks on one host and one on another, as when a host has lost a card."""
    need_hosts()
    with Hosts(2) as hosts:
        found = run_on_hosts(train, [2, 1], hosts, 'zeta', timeout=120)
    ((_, expected), _, _) = run_ranks(flat_train, 3, 'zeta')
    for shared, weights in found:
        assert shared == 0
        assert largest_difference(weights, expected) <= 1e-6


def limited_train(accelerator):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 0:
        # No file may be larger than this: sharing fails as on a host without memory.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        found = train(accelerator)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # for the lines that were counted
    return (*found, [str(each.message) for each in caught])


def test_without_shared_memory_all_ranks_take_the_loopback_interface():
    found = run_ranks(limited_train, 2, 'zeta')
    flat = run_ranks(flat_train, 2, 'zeta')
    for (shared, weights, _), (_, expected) in zip(found, flat):
        assert shared == 0
        assert largest_difference(weights, expected) == 0
    assert [text for text in found[0][2] if 'cannot share memory: rank 0: OSError' in text]


def test_memory_of_another_process_with_the_same_id_is_refused(tmp_path):
    with open(tmp_path / 'memory', 'w+b') as file:
        owner = MemoryFile(os.getpid(), file.fileno(), inode=0)
        with pytest.raises(OSError, match='^process .* is another one in this PID namespace$'):
            owner.map(8)


def memory_of_a_dead_rank(accelerator):
    start(accelerator)
    (here,) = group_by_host(gather_json(host_name()))
    memory = share_memory(1 << 20, here, gather_json, rank())
    memory[rank()].memory[:] = bytes([rank() + 1]) * (1 << 20)
    gather_json(None)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert set(memory[1].memory[:]) == {2}
    assert not [name for name in os.listdir('/dev/shm') if 'mmdevplug' in name]


def test_nothing_is_left_of_a_killed_rank():
    # Rank 0 went on with the memory of rank 1, and ended well.
    assert list(errors_of_ranks(memory_of_a_dead_rank, 2, 'cpu')) == [1]


@pytest.mark.parametrize('accelerator', ['zeta', XLA])
def test_shared_memory_is_allocated_once(accelerator):
    for found in run_ranks(allocations, 2, accelerator, **job_of(accelerator)):
        assert found[0] == found[1] == found[2]
        assert sum(size for size, _ in found[0]) <= 64 << 20
