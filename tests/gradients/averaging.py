"""What the tests of averaging run in each rank: one layer or a few, on any device."""

import os

import torch
from torch import nn

from tests.jobs import weights_of


def start(accelerator, timeout=60):
    """Start the process group on a device; returns its context."""
    from mmdevplug import init_device
    from tests.columns import backend_of
    from tests.jobs import install_card

    install_card(accelerator)
    backend = backend_of(accelerator)
    return init_device('pytorch', accelerator, forced_backend=backend, timeout=timeout)


def rank():
    return int(os.environ['RANK'])


def net(width=8):
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def wrap(module, **options):
    from mmdevplug import DeviceDistributedDataParallel

    return DeviceDistributedDataParallel(module, broadcast_buffers=False, **options)


def batch(step, device, width=8):
    """A batch of this rank."""
    generator = torch.Generator().manual_seed(100 * step + rank())
    return torch.randn(6, width, generator=generator).to(device)


def weights(wrapper):
    return weights_of(wrapper.module)


def gradients(wrapper):
    return {
        name: None if p.grad is None else p.grad.detach().cpu().numpy()
        for name, p in wrapper.module.named_parameters()
    }
