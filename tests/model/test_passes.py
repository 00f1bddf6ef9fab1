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
from tests.ranks import run_ranks


def wrap(accelerator, by_runner):
    install_card(accelerator)
    owner = sys.modules[OWNER] = ModuleType(OWNER)
    owner.get_module_device = get_module_device
    context, model = init_device('pytorch', accelerator), Generator()
    with torch.no_grad():
        model.net.bias.fill_(context.env.rank)
    model.norm = nn.SyncBatchNorm(4)
    wrapped = place_model(model, context) if by_runner else DeviceDistributedDataParallel(model)
    return (
        str(wrapped.module.net.bias.device.type),
        wrapped.module.net.bias.detach().cpu().tolist(),
        type(wrapped.module.norm).__name__,
        owner.get_module_device.__module__.startswith('mmdevplug'),
        len(wrapped.module._forward_hooks),
    )


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', LAZY])
def test_a_wrapper_alone_prepares_a_model_as_a_runner_does(accelerator):
    alone = run_ranks(wrap, 2, accelerator, False)
    assert alone == run_ranks(wrap, 2, accelerator, True)
    kind, bias, norm, asks_ours, hooks = alone[1]
    assert (kind, bias) == (accelerator, [0] * 4)
    assert norm == dict(lazy='FrozenGradientSyncBatchNorm').get(accelerator, 'DeviceSyncBatchNorm')
    assert asks_ours == (accelerator != 'cpu')
    assert hooks == (accelerator == 'lazy')  # that which materializes predictions, once


def test_running_statistics_are_kept_once(monkeypatch):
    monkeypatch.setattr(running_stats, '_updates', lambda device: False)
    layer, device = nn.BatchNorm1d(2), torch.device('cpu')
    for _ in range(2):
        running_stats.keep_running_statistics(layer, SimpleNamespace(package='acme'), device)
    assert len(layer._forward_pre_hooks) == 1
