"""Synchronized batch normalization on lazy devices: what it costs."""

import pytest

from tests.columns import job_of
from tests.jobs import PLAIN, digits_config, log_of, start
from tests.ranks import run_ranks
from tests.xla.executions import cost_of, counts

pytestmark = pytest.mark.xla


def count_executions(accelerator, layers, momentum):
    """Executions of each iteration after the first ones, and compilations in all of them."""
    import torch
    from torch import nn

    from mmdevplug import DeviceDistributedDataParallel

    context = start(accelerator)
    torch.manual_seed(0)
    pairs = [
        part
        for _ in range(layers)
        for part in (nn.Linear(4, 4), nn.SyncBatchNorm(4, momentum=momentum))
    ]
    wrapper = DeviceDistributedDataParallel(nn.Sequential(*pairs, nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    counted = []
    for step in range(8):
        # The size of the other rank's batch changes, and that of this rank's does not.
        size = 4 if context.env.rank == 0 or step < 2 else 4 + step % 2
        inputs = torch.randn(size, 4).to(context.device)
        optimizer.zero_grad()
        wrapper(inputs).square().mean().backward()
        optimizer.step()
        context.accelerator.compilation.materialize(context.device)
        counted.append(counts())
    return cost_of(counted[3:])


@pytest.mark.parametrize(('layers', 'momentum'), [(1, None), (3, 0.1)])
def test_a_layer_adds_two_executions(layers, momentum):
    results = run_ranks(count_executions, 2, 'xla', layers, momentum, **job_of('xla'))
    for executions, _ in results:
        assert set(executions) == {2 + 2 * layers}
    # Neither the number of batches so far nor the other rank's batch is compiled into the graph.
    assert results[0][1] == 0


def build(accelerator, work_dir, sync_bn):
    from mmengine.registry import RUNNERS

    cfg = digits_config(accelerator, work_dir, **PLAIN)
    cfg.model.norm = True
    cfg.sync_bn = sync_bn
    RUNNERS.build(cfg)


COST = '1 synchronized batch normalization layer(s) add 2 graph executions to an iteration on '


@pytest.mark.parametrize('accelerator', ['xla', 'gcu'])
def test_cost_is_told_once(tmp_path, accelerator):
    job = job_of(accelerator)
    run_ranks(build, 2, accelerator, tmp_path / 'auto', 'auto', **job)
    (told,) = [line for line in log_of(tmp_path / 'auto').splitlines() if COST in line]
    assert "sync_bn='per_rank'" in told
    run_ranks(build, 2, accelerator, tmp_path / 'none', 'per_rank', **job)
    assert COST not in log_of(tmp_path / 'none')
