"""What stops MMEngine on a device it does not name; each with its counterpart of ours."""

import pytest
import torch
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from torch import distributed as torch_dist, nn
from torch.nn.parallel import DistributedDataParallel

from mmdevplug import DeviceDistributedDataParallel, init_device
from tests.jobs import (
    PLAIN,
    digits_config,
    install_card,
    largest_difference,
    train_plain,
    weights_of,
)
from tests.ranks import RanksFailed, errors_of_ranks, in_ranks, run_ranks

#: What people put into their configs to keep `device_ids` away.
SEED_WRAPPER = dict(
    type='MMDistributedDataParallel', find_unused_parameters=False, broadcast_buffers=False
)

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason='is about machines without CUDA')


def config(accelerator, work_dir, wrapper, stock=False):
    """The digits example over gloo, for our runner or MMEngine's own."""
    install_card(accelerator)
    cfg = digits_config(accelerator, work_dir, **PLAIN)
    cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
    if stock:
        cfg.pop('accelerator')  # which no runner of MMEngine's passes over
        cfg.runner_type = 'Runner'
    if wrapper is not None:
        cfg.model_wrapper_cfg = dict(wrapper)
    return cfg


def run_stock(work_dir, wrapper, group_exists):
    if group_exists:
        torch_dist.init_process_group('gloo')
    RUNNERS.build(config('cpu', work_dir, wrapper, stock=True)).train()


@cpu_only
def test_stock_sets_a_cuda_device_without_cuda(tmp_path):
    with pytest.raises(RanksFailed, match='_cuda_setDevice'):
        run_ranks(run_stock, 2, tmp_path, None, False, together=True)


@cpu_only
@pytest.mark.parametrize('wrapper', [None, SEED_WRAPPER])
def test_stock_passes_device_ids_for_a_model_on_the_cpu(tmp_path, wrapper):
    kind, message = errors_of_ranks(run_stock, 2, tmp_path, wrapper, True, together=True)[1]
    assert kind == 'ValueError'
    assert 'device_ids [1]' in message


@pytest.mark.parametrize('wrapper', [None, SEED_WRAPPER, dict(SEED_WRAPPER, device_ids=[1])])
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@in_ranks(2)
def test_ours_trains_whatever_the_config_passes(tmp_path, accelerator, wrapper):
    runner = RUNNERS.build(config(accelerator, tmp_path, wrapper))
    runner.train()
    device = next(runner.model.parameters()).device
    assert str(device) == ('cpu' if accelerator == 'cpu' else f'zeta:{runner.rank}')
    assert runner.model.device_ids is None


@in_ranks(2)
def test_gloo_refuses_the_tensors_of_a_card():
    install_card('zeta')
    torch_dist.init_process_group('gloo')
    # PyTorch 2.6 and before, or later.
    told = "Could not run 'c10d::allgather_'|No backend type associated with device type zeta"
    with pytest.raises((RuntimeError, NotImplementedError), match=told):
        DistributedDataParallel(nn.Linear(2, 2).to('zeta:0'))


def stock_with_our_wrapper(work_dir, accelerator):
    """MMEngine's runner, where the model's wrapper alone is ours."""
    install_card(accelerator)
    init_device('pytorch', accelerator)
    wrapper = dict(type='DeviceDistributedDataParallel', broadcast_buffers=False)
    cfg = config(accelerator, work_dir, wrapper, stock=True)
    cfg.custom_imports = dict(imports=['mmdevplug'])
    cfg.train_dataloader.batch_size = 64
    runner = RUNNERS.build(cfg)
    assert type(runner) is Runner
    assert isinstance(runner.model, DeviceDistributedDataParallel)
    runner.train()
    return weights_of(runner.model.module)


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_stock_runner_with_our_wrapper_alone(tmp_path, accelerator):
    weights = run_ranks(stock_with_our_wrapper, 2, tmp_path, accelerator)
    expected = run_ranks(train_plain, 2, accelerator, tmp_path)[0]['weights']
    assert largest_difference(weights[0], weights[1]) == 0.0
    assert largest_difference(weights[0], expected) <= 1e-4
