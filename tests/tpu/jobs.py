"""What the tests on TorchTPU run in the processes of a job: scenarios of other tests."""

import torch
from torch import nn

from tests.device_guard.test_guard_legal import guarded_digits
from tests.features.rows import train_rows
from tests.jobs import train_two_epochs

#: Rows of the feature table.
ROWS = ['sgd', 'clip_norm', 'ema', 'amp', 'sync_bn', 'unused']


def train_tiny(device, compiled):
    """The loss after three steps of a model, compiled by TorchTPU's own backend or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = torch.compile(model) if compiled else model
    inputs = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        loss = forward(inputs).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def alone(folder):
    """What one process does."""
    from mmdevplug.accelerators import get_accelerator

    accelerator = get_accelerator('tpu')
    found = dict(digits=train_two_epochs('tpu', folder / 'digits'))
    device = accelerator.device()
    found['memory'] = [accelerator.memory_total(device), accelerator.memory_allocated(device)]
    found['guard'] = guarded_digits('tpu', folder / 'guard')
    found['compiled'] = [train_tiny(device, compiled) for compiled in (False, True)]
    return found


def together(folder):
    """What each of two ranks does."""
    return dict(
        digits=train_two_epochs('tpu', folder / 'digits'),
        rows=train_rows(ROWS, 'tpu', folder / 'rows'),
    )
