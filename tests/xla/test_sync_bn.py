"""Synchronized batch normalization on lazy devices."""

import pytest

from tests.jobs import PLAIN, digits_config, largest_difference, log_of, start
from tests.model.sync_bn_cases import CASES, compare, run_all
from tests.model.test_sync_bn import one_value, train_normalized
from tests.ranks import RanksFailed, run_ranks
from tests.xla.executions import cost_of, counts
from tests.xla.t20 import with_calls

pytestmark = pytest.mark.xla

TWO_DEVICES = dict(CPU_NUM_DEVICES='2')


def on_two(accelerator, function, *args, **options):
    """Run a function in two ranks, which get the name of the accelerator first."""
    if accelerator == 'xla':
        return run_ranks(function, 2, 'xla', *args, environ=TWO_DEVICES, **options)
    found = run_ranks(with_calls, 2, function, 'gcu', *args, **options)
    return [result for result, _ in found]


@pytest.fixture(scope='module')
def found():
    jobs = {}

    def of(accelerator):
        if accelerator not in jobs:
            jobs[accelerator] = on_two(accelerator, run_all)
        return jobs[accelerator]

    return of


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('accelerator', ['xla', 'gcu'])
def test_ranks_together_compute_what_one_process_does(found, accelerator, name):
    compare(name, [result[name] for result in found(accelerator)], 2)


@pytest.mark.parametrize('accelerator', ['xla', 'gcu'])
def test_one_value_per_channel_is_refused_on_all_ranks(accelerator):
    with pytest.raises(RanksFailed) as raised:
        on_two(accelerator, one_value, together=True)
    assert sorted(raised.value.errors) == [0, 1]
    for kind, message, _ in raised.value.errors.values():
        assert kind == 'ModelError'
        assert "'1.0'" in message
        assert 'hold 1 value per channel' in message


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
    results = on_two('xla', count_executions, layers, momentum)
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
    on_two(accelerator, build, tmp_path / 'auto', 'auto')
    (told,) = [line for line in log_of(tmp_path / 'auto').splitlines() if COST in line]
    assert "sync_bn='per_rank'" in told
    on_two(accelerator, build, tmp_path / 'none', 'per_rank')
    assert COST not in log_of(tmp_path / 'none')


@pytest.mark.parametrize('accelerator', ['xla', 'gcu'])
def test_trains_as_one_process_on_the_cpu(tmp_path, accelerator):
    (expected,) = run_ranks(train_normalized, 0, 'cpu', tmp_path / 'cpu')
    for result in on_two(accelerator, train_normalized, tmp_path / accelerator, 'auto'):
        # The running variance too, of which torch_xla's own layer keeps another kind.
        assert largest_difference(result['weights'], expected['weights']) <= 1e-4
