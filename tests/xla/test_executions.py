"""What features cost on a lazy device: graph executions of an iteration, and recompilations."""

import os

import pytest

from tests.features.rows import row_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.xla

#: The gradients of an iteration, and the update; a GAN has the gradients of two parts.
EXECUTIONS = dict(
    sgd=2,
    checkpoint=2,
    checkpoint_reentrant=2,
    activation_checkpointing=2,
    anomalous=2,
    schedulers=2,
    gan=3,
)


def count_executions(names, work_dir):
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics
    from mmengine.hooks import Hook

    from mmdevplug.runner import DeviceRunner
    from tests.features import parts  # noqa: F401

    class Counts(Hook):
        priority = 'LOWEST'

        def __init__(self):
            self.seen = []

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            xm.wait_device_ops()  # executions are counted when they end
            found = [metrics.metric_data(name) for name in ('ExecuteTime', 'CompileTime')]
            self.seen.append([data[0] if data else 0 for data in found])

    os.chdir(work_dir)
    result = {}
    for name in names:
        cfg = row_config(name, 'xla', work_dir)
        cfg.default_hooks.logger = dict(type='LoggerHook', interval=1)
        runner = DeviceRunner.from_cfg(cfg)
        runner.logger.handlers.clear()
        counts = Counts()
        runner.register_hook(counts)
        runner.train()
        warm = counts.seen[4:]
        executions = [b[0] - a[0] for a, b in zip(warm, warm[1:])]
        result[name] = (executions, warm[-1][1] - warm[0][1])
    return result


@pytest.fixture(scope='module')
def counted(tmp_path_factory):
    folder = tmp_path_factory.mktemp('executions')
    names = list(EXECUTIONS)
    return run_ranks(count_executions, 2, names, folder, environ=dict(CPU_NUM_DEVICES='2'))


@pytest.mark.parametrize('name', EXECUTIONS)
def test_executions_of_an_iteration(counted, name):
    for found in counted:
        executions, compilations = found[name]
        assert len(executions) >= 10
        assert set(executions) == {EXECUTIONS[name]}
        assert compilations == 0
