"""What the tests on TorchTPU run in the processes of a job: scenarios of other tests."""

import torch
from torch import nn

from tests.checkpoint.training import train
from tests.device_guard.test_guard_legal import guarded_digits
from tests.features.rows import train_rows
from tests.jobs import train_digits

#: Rows of the feature table.
ROWS = ['sgd', 'clip_norm', 'ema', 'amp', 'sync_bn', 'unused']
EVERY_THIRD = dict(interval=3, by_epoch=False)
OVER_GLOO = dict(accelerator__type='tpu', accelerator__backend='gloo')


def digits(work_dir, **options):
    """Two epochs of the digits example."""
    options = dict(
        OVER_GLOO,
        train_cfg__max_epochs=2,
        train_cfg__val_interval=2,
        default_hooks__checkpoint=None,
        **options,
    )
    found = train_digits('tpu', work_dir, 128, **options)
    return {key: found[key] for key in ('accuracy', 'device', 'wrapper', 'staged')}


def resumed(work_dir, stop_at=None, accelerator='tpu', **options):
    """A training with dropout, averaged weights and clipping, perhaps until a rank dies."""
    hooks = [dict(type='EMAHook', momentum=0.1)]
    if stop_at is not None:
        hooks.append(dict(type='DieAt', iteration=stop_at))
    return train(
        work_dir,
        accelerator,
        by_epoch=False,
        length=12,
        checkpoint=EVERY_THIRD,
        custom_hooks=hooks,
        **options,
    )


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
    found = dict(digits=digits(folder / 'digits'))
    device = accelerator.device()
    found['memory'] = [accelerator.memory_total(device), accelerator.memory_allocated(device)]
    found['guard'] = guarded_digits('tpu', folder / 'guard')
    found['compiled'] = [train_tiny(device, compiled) for compiled in (False, True)]
    return found


def together(folder):
    """What each of two ranks does."""
    return dict(digits=digits(folder / 'digits'), rows=train_rows(ROWS, 'tpu', folder / 'rows'))
