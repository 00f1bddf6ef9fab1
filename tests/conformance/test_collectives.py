"""Every collective that training needs, with values that are known.

Rank r of N puts in ``(r + 1) * pattern``, where the pattern repeats 1 to 7: whole numbers that
float32 holds exactly; only averages are rounded.
"""

import pytest
import torch
from torch import distributed as torch_dist, nn

from mmdevplug import DeviceDistributedDataParallel, init_device
from mmdevplug.accelerators.backend import takes_tensors
from tests.conformance.test_training import RANKS, need_devices

#: Numbers in a message.
COUNTS = (1, 4096, 1 << 20)
#: Relative to the largest expected value.
TOLERANCE = 1e-6


class Weighted(nn.Module):
    """One parameter, whose gradient is the input."""

    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, factors):
        return (self.weight * factors).sum()


def pattern(count, factor=1.0):
    return factor * (torch.arange(count) % 7 + 1).float()


def collectives(card):
    """Name, expected and found values of each collective, on this rank."""
    need_devices(card)
    context = init_device('pytorch', card.options.device, forced_backend=card.options.backend)
    rank, size = context.env.rank, context.env.world_size
    takes = takes_tensors(context.accelerator, context.backend)
    device = context.device if takes else torch.device('cpu')
    total = size * (size + 1) / 2
    for count in COUNTS:
        own = pattern(count, rank + 1)
        summed = own.to(device, copy=True)
        torch_dist.all_reduce(summed)
        yield 'all_reduce', pattern(count, total), summed
        sent = own.to(device, copy=True)
        torch_dist.broadcast(sent, size - 1)
        yield 'broadcast', pattern(count, size), sent
        gathered = [torch.zeros(count, device=device) for _ in range(size)]
        torch_dist.all_gather(gathered, own.to(device))
        for other, each in enumerate(gathered):
            yield 'all_gather', pattern(count, other + 1), each
        wrapper = DeviceDistributedDataParallel(Weighted(count))
        wrapper(own.to(context.device)).backward()
        yield 'gradient averaging', pattern(count, total / size), wrapper.module.weight.grad
    store = torch_dist.distributed_c10d._get_default_store()
    store.add('tests/conformance', 1)
    torch_dist.barrier()
    yield 'barrier', torch.tensor([size]), torch.tensor([store.add('tests/conformance', 0)])


def compare(card):
    """What is wrong on this rank."""
    wrong = []
    for name, expected, found in collectives(card):
        print(f'{name} of {expected.numel()}', flush=True)  # the last line names one that hangs
        (found,) = card.accelerator.copies.to_host([found.detach()])
        apart = (found - expected).abs().max().item()
        if not apart <= TOLERANCE * expected.abs().max().item():
            wrong.append(f'{name} of {expected.numel()} differs by {apart:g}')
    torch_dist.barrier()
    return wrong


@pytest.mark.timeout(300)
def test_collectives(asked):
    """All-reduce, broadcast, all-gather, averages of gradients and the barrier of two ranks."""
    assert asked.run(compare, ranks=RANKS) == [[]] * RANKS
