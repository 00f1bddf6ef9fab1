"""What the tests of averaging run in each rank: one layer or a few, on any device."""

import os

import torch
from torch import nn

from mmdevplug import DeviceDistributedDataParallel
from tests.jobs import start


def rank():
    return int(os.environ['RANK'])


def net(width=8):
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def deep(layers=12, width=128):
    """The same on all ranks: layers of one width."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def wrap(module, **options):
    return DeviceDistributedDataParallel(module, broadcast_buffers=False, **options)


def batch(step, device, width=8, number=None):
    """A batch of this rank, or of another."""
    number = rank() if number is None else number
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(6, width, generator=generator).to(device)


def gradients(wrapper):
    return {
        name: None if p.grad is None else p.grad.detach().cpu().numpy()
        for name, p in wrapper.module.named_parameters()
    }


def shared_sums(wrapper):
    """How many sums were in memory that ranks of a host share."""
    sums = wrapper.averaging.setting.group.sums
    return 0 if sums is None else sums.count


def allocations(accelerator):
    """The shared memory of each of three iterations: its sizes in bytes, and which it is."""
    context = start(accelerator)
    wrapper = wrap(deep(layers=16, width=512))
    found = []
    for step in range(3):
        wrapper.zero_grad()
        wrapper(batch(step, context.device, 512)).square().mean().backward()
        sums = wrapper.averaging.setting.group.sums
        found.append([(len(each.memory), id(each.memory)) for each in sums.parts])
    return found
