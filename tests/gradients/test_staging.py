"""Host staging: what overlaps with backward, what is allocated, what remains afterwards."""

import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from mmengine.logging import MMLogger
from torch import nn

from benchmarks.hosts import INTERFACE, Hosts, available
from tests.gradients.averaging import batch, gradients, net, rank, start, wrap
from tests.jobs import ROOT, checkpoint, largest_difference, need_card, weights_of
from tests.ranks import RanksFailed, launch_variables, run_ranks


def deep(layers=12, width=128):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def under_way_in_backward(accelerator):
    context = start(accelerator)
    wrapper = wrap(deep(), bucket_cap_mb=0.1)
    inputs = batch(0, context.device, 128).requires_grad_(True)
    seen = []

    def look(gradient):
        # Backward has just one layer left: the first, whose weight's gradient comes after this.
        seen.append([work.completed for work in wrapper.staging._works])

    inputs.register_hook(look)
    wrapper(inputs).sum().backward()
    return seen, len(wrapper.staging._buckets)


def test_buckets_start_during_backward_on_an_eager_device():
    for seen, buckets in run_ranks(under_way_in_backward, 2, 'zeta'):
        assert buckets >= 6
        (completed,) = seen
        assert len(completed) >= buckets - 2
        assert sum(completed) >= 1


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


def in_parts(accelerator):
    context = start(accelerator)
    wrapper = wrap(TwoSegments(), bucket_cap_mb=1e-4)
    found = []
    for step in range(3):
        wrapper.zero_grad()
        wrapper(batch(step, context.device)).square().mean().backward()
        found.append(gradients(wrapper))
    return found


def average_of_ranks(step, ranks):
    """The same by hand, in one process."""
    total = {}
    for number in range(ranks):
        os.environ['RANK'] = str(number)
        module = TwoSegments()
        module(batch(step, 'cpu')).square().mean().backward()
        for name, parameter in module.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad.numpy() / ranks
    return total


def test_a_gradient_that_comes_in_parts_is_averaged_whole(monkeypatch):
    monkeypatch.setenv('RANK', '0')
    expected = [average_of_ranks(step, 2) for step in range(3)]
    for found in run_ranks(in_parts, 2, 'zeta'):
        assert max(largest_difference(a, b) for a, b in zip(found, expected)) <= 1e-6


def used_now_and_then(accelerator):
    context = start(accelerator)
    torch.manual_seed(0)
    parts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = parts

        def forward(self, inputs, which):
            for index in which:
                inputs = self.parts[index](inputs)
            return inputs

    wrapper = wrap(Choosing(), bucket_cap_mb=1e-4)
    plan = [[0, 1], [0, 1], [0, 3], [2] if rank() else [0], [0, 1, 2, 3], []]
    found = []
    for step, which in enumerate(plan):
        wrapper.zero_grad(set_to_none=True)
        output = wrapper(batch(step, context.device).requires_grad_(True), which)
        output.square().mean().backward()
        found.append({name: g is not None for name, g in gradients(wrapper).items()})
    return found


def test_parameters_that_no_rank_used_are_left_alone():
    expected = [{0, 1}, {0, 1}, {0, 3}, {0, 2}, {0, 1, 2, 3}, set()]
    for found in run_ranks(used_now_and_then, 2, 'zeta'):
        for step, names in zip(found, expected):
            there = {int(name.split('.')[1]) for name, is_there in step.items() if is_there}
            assert there == names


# shared memory -----------------------------------------------------------------------------------


def train(accelerator, **options):
    context = start(accelerator)
    wrapper = wrap(net(64), **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        wrapper(batch(step, context.device, 64)).square().mean().backward()
        optimizer.step()
    return type(wrapper.staging.reduction).__name__, weights_of(wrapper.module)


@pytest.mark.parametrize('ranks', [2, 4])
def test_ranks_of_a_host_add_up_in_shared_memory(ranks):
    shared = run_ranks(train, ranks, 'zeta')
    flat = run_ranks(flat_train, ranks, 'zeta')
    for (kind, weights), (other_kind, other) in zip(shared, flat):
        assert (kind, other_kind) == ('TwoLevelReduction', 'Reduction')
        assert largest_difference(weights, shared[0][1]) == 0
        assert largest_difference(weights, other) <= (0 if ranks == 2 else 1e-6)


def flat_train(accelerator):
    return train(accelerator, hierarchy=False)


def train_in_pairs():
    from torch import distributed as torch_dist

    context = start('zeta')
    pairs = [torch_dist.new_group([0, 2]), torch_dist.new_group([1, 3])]
    wrapper = wrap(net(64), process_group=pairs[rank() % 2])
    inputs = torch.full((4, 64), float(rank())).to(context.device)
    wrapper(inputs).sum().backward()
    torch_dist.barrier()  # Rank 0 holds the store, and its pair may be done first.
    return type(wrapper.staging.reduction).__name__, gradients(wrapper)['0.bias']


def plain_gradient(number):
    module = net(64)
    module(torch.full((4, 64), float(number))).sum().backward()
    return module[0].bias.grad.numpy()


UNLIKE = (
    'import sys, torch; from tests.gradients import test_staging as t; t.save_trained(sys.argv[1])'
)


def save_trained(path):
    kind, weights = train('zeta')
    np.savez(path, kind=kind, **weights)


@pytest.mark.long
def test_hosts_with_unlike_numbers_of_ranks(tmp_path):
    """Two ranks on one host and one on another, as when a host has lost a card."""
    need_card()
    found = available()
    if not found.possible:
        pytest.skip(found.reason)
    paths = [str(ROOT), str(ROOT / 'tests' / 'standins' / 'fakecard')]
    jobs = []
    with Hosts(2) as hosts:
        for number, (host, local_rank, local_size) in enumerate([(0, 0, 2), (0, 1, 2), (1, 0, 1)]):
            environ = launch_variables(number, 3, 29500)
            environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
            environ.update(MASTER_ADDR=hosts.address, GLOO_SOCKET_IFNAME=INTERFACE)
            command = [sys.executable, '-c', UNLIKE, str(tmp_path / f'{number}.npz')]
            jobs.append(
                subprocess.Popen(
                    hosts.command(host, command),
                    cwd=str(ROOT),
                    env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths), **environ),
                )
            )
        try:
            assert [job.wait(timeout=120) for job in jobs] == [0, 0, 0]
        finally:
            for job in jobs:
                job.kill()
    ((_, expected), _, _) = run_ranks(flat_train, 3, 'zeta')
    for number in range(3):
        weights = dict(np.load(str(tmp_path / f'{number}.npz')))
        assert weights.pop('kind') == 'Reduction'
        assert largest_difference(weights, expected) <= 1e-6


def test_a_group_of_some_ranks_averages_by_itself():
    for number, (kind, found) in enumerate(run_ranks(train_in_pairs, 4)):
        assert kind == 'TwoLevelReduction'
        pair = (number % 2, number % 2 + 2)
        expected = sum(plain_gradient(other) for other in pair) / 2
        np.testing.assert_allclose(found, expected, atol=1e-6)


def limited_train(accelerator, log_dir):
    MMLogger.get_instance('limited', log_file=str(log_dir / f'{rank()}.log'))
    if rank() == 1:
        # No file may be larger than this: sharing fails as on a host without memory.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    return train(accelerator)


def test_without_shared_memory_all_ranks_take_the_loopback_interface(tmp_path):
    found = run_ranks(limited_train, 2, 'zeta', tmp_path)
    flat = run_ranks(flat_train, 2, 'zeta')
    for (kind, weights), (_, expected) in zip(found, flat):
        assert kind == 'Reduction'
        assert largest_difference(weights, expected) == 0
    assert 'cannot share memory: rank 1: OSError' in (tmp_path / '0.log').read_text()


def test_memory_of_another_process_with_the_same_id_is_refused(tmp_path):
    from mmdevplug.gradients.shared_memory import _map

    with open(tmp_path / 'memory', 'w+b') as file:
        owner = dict(pid=os.getpid(), file=file.fileno(), inode=0)
        with pytest.raises(OSError, match='^process .* is another one in this PID namespace$'):
            _map(owner, 8)


def slots_of_a_dead_rank(accelerator):
    start(accelerator)
    from mmdevplug.distributed.json_messages import gather_json
    from mmdevplug.gradients.shared_memory import find_hosts, share_slots

    hosts = find_hosts()
    slots = share_slots(1 << 20, hosts)
    slots[rank()].fill_(rank() + 1)
    gather_json(None)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert set(slots[1].tolist()) == {2}
    assert not [name for name in os.listdir('/dev/shm') if 'mmdevplug' in name]


def test_nothing_is_left_of_a_killed_rank():
    with pytest.raises(RanksFailed) as raised:
        run_ranks(slots_of_a_dead_rank, 2, 'cpu')
    # Rank 0 went on with the memory of rank 1, and ended well.
    assert list(raised.value.errors) == [1]


# memory ------------------------------------------------------------------------------------------


def allocations(accelerator):
    """Host memory that averaging needs, in units of the gradients' size.

    What is sent becomes the device's own memory, which is host memory here, too; so measured
    iterations end before it.
    """
    from torch.profiler import ProfilerActivity, profile

    context = start(accelerator)
    wrapper = wrap(deep(layers=16, width=512))
    staging = wrapper.staging
    size = sum(p.numel() * p.element_size() for p in staging.parameters)
    buffers = sum(memory.numel() * memory.element_size() for memory in staging._memory.values())
    addresses = []
    peaks = []
    with profile(activities=[ProfilerActivity.CPU]):  # up to 2.4 it has to begin in this thread
        pass
    for step in range(3):
        wrapper.zero_grad()
        loss = wrapper(batch(step, context.device, 512)).square().mean()
        finish, measured = staging._finish, []

        def measure(finish=finish, measured=measured):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                finish()
            measured.append(_peak(profiler))

        staging._finish, staging._send = measure, lambda *_: None
        loss.backward()
        staging._finish = finish
        peaks += measured
        addresses.append([memory.data_ptr() for memory in staging._memory.values()])
    return buffers / size, max(peaks) / size, len({tuple(found) for found in addresses})


def _peak(profiler):
    """The most host memory that was allocated at a time, in bytes."""
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.name() == '[memory]' and 'CPU' in str(event.device_type())
    ]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(np.cumsum([0, *sizes]))


def test_host_memory_is_allocated_once():
    for buffers, peak, places in run_ranks(allocations, 2, 'zeta'):
        assert buffers == 1
        assert places == 1
        assert peak <= 0.01
