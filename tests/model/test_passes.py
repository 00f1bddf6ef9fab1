"""What is done to a bare model: the same by a runner and by a wrapper that a script builds."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from mmdevplug import init_device
from mmdevplug.gradients import DeviceDistributedDataParallel
from mmdevplug.model import running_stats
from mmdevplug.model.place_model import place_model
from tests.columns import LAZY
from tests.jobs import install_card
from tests.patches.test_module_device import OWNER, Generator, get_module_device
from tests.ranks import in_ranks


@pytest.mark.parametrize('by_runner', [False, True])
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', LAZY])
@in_ranks(2)
def test_a_wrapper_alone_prepares_a_model_as_a_runner_does(accelerator, by_runner):
    install_card(accelerator)
    owner = sys.modules[OWNER] = ModuleType(OWNER)
    owner.get_module_device = get_module_device
    context, model = init_device('pytorch', accelerator), Generator()
    with torch.no_grad():
        model.net.bias.fill_(context.env.rank)
    model.norm = nn.SyncBatchNorm(4)
    wrapped = place_model(model, context) if by_runner else DeviceDistributedDataParallel(model)
    assert wrapped.module.net.bias.device.type == accelerator
    assert wrapped.module.net.bias.detach().cpu().tolist() == [0] * 4
    norm = dict(lazy='FrozenGradientSyncBatchNorm').get(accelerator, 'DeviceSyncBatchNorm')
    assert type(wrapped.module.norm).__name__ == norm
    asks_ours = owner.get_module_device.__module__.startswith('mmdevplug')
    assert asks_ours == (accelerator != 'cpu')
    # That which materializes predictions, once.
    assert len(wrapped.module._forward_hooks) == (accelerator == 'lazy')


def test_running_statistics_are_kept_once(monkeypatch):
    monkeypatch.setattr(running_stats, '_updates', lambda device: False)
    layer, device = nn.BatchNorm1d(2), torch.device('cpu')
    for _ in range(2):
        running_stats.keep_running_statistics(layer, SimpleNamespace(package='acme'), device)
    assert len(layer._forward_pre_hooks) == 1
