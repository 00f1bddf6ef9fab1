"""What features cost on a lazy device: graph executions of an iteration, and recompilations."""

import os

import pytest

from tests.features.rows import row_config
from tests.ranks import run_ranks
from tests.xla.executions import cost_of, train_counted

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
#: Iterations of the own loop whose gradients add up.
ACCUMULATED = 4


def register_own_loop():
    """Register a loop that calls the model and the optimizer wrapper, and no ``train_step``."""
    from mmengine.registry import LOOPS
    from mmengine.runner import IterBasedTrainLoop

    @LOOPS.register_module(force=True)
    class OwnLoop(IterBasedTrainLoop):
        def run_iter(self, data_batch):
            hook_arguments = dict(batch_idx=self._iter, data_batch=data_batch)
            self.runner.call_hook('before_train_iter', **hook_arguments)
            model, optim_wrapper = self.runner.model, self.runner.optim_wrapper
            with optim_wrapper.optim_context(model):
                data = model.module.data_preprocessor(data_batch, training=True)
                losses = model(**data, mode='loss')
            loss, outputs = model.module.parse_losses(losses)
            optim_wrapper.update_params(loss)
            self.runner.call_hook('after_train_iter', **hook_arguments, outputs=outputs)
            self._iter += 1


def count_executions(names, work_dir):
    from mmdevplug.runner import DeviceRunner
    from tests.features import parts  # noqa: F401

    os.chdir(work_dir)
    result = {}
    for name in names:
        cfg = row_config('sgd' if name == 'own_loop' else name, 'xla', work_dir)
        if name == 'own_loop':
            register_own_loop()
            cfg.train_cfg.type = 'OwnLoop'
            cfg.optim_wrapper.accumulative_counts = ACCUMULATED
        cfg.default_hooks.logger = dict(type='LoggerHook', interval=1)
        runner = DeviceRunner.from_cfg(cfg)
        runner.logger.handlers.clear()
        result[name] = cost_of(train_counted(runner)[4:])
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


def test_a_loop_without_train_step(tmp_path):
    """Iterations that only accumulate have no gradients to average, and cost one execution."""
    for found in run_ranks(
        count_executions, 2, ['own_loop'], tmp_path, environ=dict(CPU_NUM_DEVICES='2')
    ):
        executions, _ = found['own_loop']
        assert len(executions) >= 10
        assert executions.count(1) >= len(executions) * (ACCUMULATED - 1) // ACCUMULATED
        assert set(executions) == {1, 2}
