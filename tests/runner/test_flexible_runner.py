"""DeviceFlexibleRunner with DeviceStrategy: it takes every option of ``accelerator``."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import FlexibleRunner

from mmdevplug.errors import DevPlugError
from mmdevplug.fault_tolerance.failure import current_watch
from tests.hooks.memory_jobs import config
from tests.hooks.test_loss_check_hook import Spoil  # noqa: F401  registers it
from tests.jobs import largest_difference, weights_of
from tests.ranks import RanksFailed, run_ranks

OURS = {
    'CommunicationHook',
    'CompilationHook',
    'DeviceHook',
    'LossCheckHook',
    'MemoryHook',
    'MMCVOpsHook',
    'PhaseHook',
    'PreemptionHook',
}
SPOIL = dict(type='Spoil', iteration=5, rank=1)
PREEMPT = dict(type='Preempt', iteration=5, rank=1)
REPLACED = {'DeviceIterTimerHook', 'SafeCheckpointHook'}


@HOOKS.register_module(force=True)
class Preempt(Hook):
    """Sends SIGTERM to a rank, as a scheduler does, and lets all ranks hear of it."""

    def __init__(self, iteration, rank):
        self.iteration, self.rank = iteration, rank

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter + 1 != self.iteration:
            return
        if runner.rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        while current_watch().stop_requests.reason is None:
            time.sleep(0.01)


def flexible(work_dir, hooks=(), strategy='DeviceStrategy', keep_key=False, **options):
    """A DeviceFlexibleRunner; ``options`` are of ``accelerator``."""

    from mmdevplug.runner import DeviceFlexibleRunner

    iterations = options.pop('iterations', 20)
    resume = options.pop('resume', False)
    cfg = config(work_dir, hooks=hooks, iterations=iterations)
    cfg.update(runner_type='DeviceFlexibleRunner', resume=resume)
    cfg['strategy'] = dict(type=strategy)
    if not keep_key:
        cfg.pop('accelerator')
        if strategy == 'DeviceStrategy':
            cfg['strategy']['accelerator'] = dict(type='cpu', **options)
    return DeviceFlexibleRunner.from_cfg(Config(cfg))


def names(runner):
    return {type(hook).__name__ for hook in runner.hooks}


def build_some(work_dir):
    found = {}
    runner = flexible(work_dir / 'all', memory=dict(interval=7), hook=dict(on_mismatch='error'))
    found['all'] = names(runner)
    (memory,) = [hook for hook in runner.hooks if type(hook).__name__ == 'MemoryHook']
    (device,) = [hook for hook in runner.hooks if type(hook).__name__ == 'DeviceHook']
    found['arguments'] = (memory.options.interval, device.on_mismatch)
    found['log'] = type(runner.log_processor).__name__
    off = dict(memory=False, preemption=False, safe_checkpoints=False)
    found['off'] = names(flexible(work_dir / 'off', **off))
    found['once'] = [
        type(hook).__name__
        for hook in flexible(work_dir / 'once', [dict(type='DeviceHook')]).hooks
    ].count('DeviceHook')
    for key, value in dict(on_nan='skip', memory='much', compilations=dict(depth=3)).items():
        with pytest.raises(DevPlugError, match=f'accelerator.{key}(=| has no option)'):
            flexible(work_dir / 'wrong', **{key: value})
    with pytest.raises(DevPlugError, match=r'ignores the config key accelerator=.*strategy='):
        flexible(work_dir / 'key', keep_key=True)
    with pytest.raises(DevPlugError, match="SingleDeviceStrategy.*runner_type='FlexibleRunner'"):
        flexible(work_dir / 'stock', strategy='SingleDeviceStrategy')
    cfg = config(work_dir / 'stock', iterations=2)
    cfg['strategy'] = dict(type='DeviceStrategy', accelerator=cfg.pop('accelerator'))
    with pytest.raises(DevPlugError, match="Expected runner_type='DeviceFlexibleRunner'"):
        FlexibleRunner.from_cfg(Config(cfg))
    return found


def test_hooks_are_those_of_device_runner(tmp_path):
    (found,) = run_ranks(build_some, 0, tmp_path)
    several = {'CommunicationHook', 'PhaseHook'}
    lazy = {'CompilationHook'}
    assert found['all'] & (OURS | REPLACED) == OURS - several - lazy - {'LossCheckHook'} | REPLACED
    assert found['arguments'] == (7, 'error')
    assert found['log'] == 'DeviceLogProcessor'
    assert not found['off'] & {'MemoryHook', 'PreemptionHook', 'SafeCheckpointHook'}
    assert {'DeviceHook', 'CheckpointHook'} <= found['off']
    assert found['once'] == 1


def train(work_dir, hooks, options):
    runner = flexible(work_dir, hooks, **options)
    try:
        runner.train()
    except SystemExit as ended:
        return runner.iter, ended.code, names(runner)
    return runner.iter, weights_of(getattr(runner.model, 'module', runner.model)), names(runner)


def test_all_ranks_stop_at_a_loss_that_is_not_finite(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train, 2, tmp_path, [SPOIL], dict(on_nan='stop'))
    errors = failed.value.errors
    assert errors[1][0] == 'ModelError'
    assert 'rank 1, iteration 5: loss_aux=' in errors[1][1]
    assert errors[0][0] == 'RankFailedError'


def test_a_signal_saves_and_the_resumed_run_ends_with_the_same_weights(tmp_path):
    expected = run_ranks(train, 2, tmp_path / 'whole', [], {})
    assert expected[0][2] >= OURS - {'CompilationHook', 'LossCheckHook'}
    stopped = run_ranks(train, 2, tmp_path / 'cut', [PREEMPT], {})
    (iteration,) = {iteration for iteration, _, _ in stopped}
    assert 4 <= iteration < 19
    assert [code for _, code, _ in stopped] == [0, 0]
    assert Path(tmp_path / 'cut' / f'interrupted_iter_{iteration + 1}.pth').is_file()
    resumed = run_ranks(train, 2, tmp_path / 'cut', [], dict(resume=True))
    for (_, weights, _), (last, found, _) in zip(expected, resumed):
        assert last == 20
        assert largest_difference(found, weights) == 0.0
        assert all(torch.isfinite(torch.as_tensor(value)).all() for value in found.values())
