"""Trainings whose global batch stays, on any number of ranks; see `test_global_batch`."""

import json
import os
import time
from pathlib import Path

import torch
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS

from mmdevplug.hooks.preemption_hook import save_now
from mmdevplug.runner import DeviceRunner
from tests.checkpoint import resuming
from tests.checkpoint.training import NoisyDataset, config
from tests.jobs import weights_of

#: Iterations of 4 ranks with 2 samples each; 4 of them are an epoch of 32 samples.
SAMPLES, STEP, LENGTH = 32, 2, 12
GLOBAL = 8


@DATASETS.register_module(force=True)
class PlainDataset(NoisyDataset):
    """Samples without noise, which no random state decides."""

    def prepare_data(self, idx):
        data = self.get_data_info(idx)
        return dict(inputs=data['inputs'], targets=data['targets'])


@HOOKS.register_module(force=True)
class WriteSamples(Hook):
    """Appends the samples of each iteration to a file for each process, slowly."""

    priority = 'LOWEST'

    def __init__(self, folder, pause):
        self.folder, self.pause = Path(folder), pause

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        time.sleep(self.pause)
        line = [time.time(), runner.world_size, runner.iter, samples_of_batch(data_batch)]
        with open(str(self.folder / f'{runner.rank} {os.getpid()}'), 'a') as file:
            file.write(json.dumps(line) + '\n')


def samples_of_batch(data_batch):
    """The samples of each part, known by their targets."""
    parts = data_batch if isinstance(data_batch, list) else [data_batch]
    return [[round(float(one), 5) for one in part['targets'][:, 0]] for part in parts]


class Look(Hook):
    """Notes the samples, the rate and the loss of each iteration, and stops after one."""

    priority = 'LOWEST'

    def __init__(self, stop):
        self.stop, self.seen = stop, {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        samples = samples_of_batch(data_batch)
        rate = runner.optim_wrapper.get_lr()['lr'][0]
        self.seen[runner.iter] = (samples, rate, float(outputs['loss'].detach()))
        if runner.iter + 1 == self.stop:
            save_now(runner)
            raise SystemExit(0)


def train(folder, by_epoch=True, stop=None, resume=False, rule=None, wanted=None, **changes):
    """Train in this rank.

    Returns:
        tuple: The weights, and what :class:`Look` has seen.
    """
    torch.manual_seed(0)
    cfg = whole_config(folder, by_epoch, **changes)
    if rule is not None:
        cfg['accelerator'].update(global_batch_rule=rule)
    if wanted is not None:
        cfg['accelerator'].update(global_batch=wanted)
    cfg.update(experiment_name=f'run_{next(resuming._numbers)}', resume=resume)
    cfg.setdefault('auto_scale_lr', None)
    with resuming.quickly():
        runner, look = DeviceRunner.from_cfg(resuming.Config(cfg)), Look(stop)
        runner.register_hook(look)
        try:
            runner.train()
        except SystemExit:
            assert stop is not None
    return weights_of(getattr(runner.model, 'module', runner.model)), look.seen


def whole_config(folder, by_epoch=True, **changes):
    """The config of a short training in which nothing is random."""
    options = dict(
        by_epoch=by_epoch,
        length=LENGTH // 4 if by_epoch else LENGTH,
        checkpoint=dict(interval=100, by_epoch=False),
        train_dataloader__dataset=dict(type='PlainDataset', indices=SAMPLES),
        train_dataloader__batch_size=STEP,
        val_dataloader__dataset=dict(type='PlainDataset', indices=8),
        train_cfg__val_interval=100,
        model=dict(type='NoisyModel', dropout=0.0),
        custom_hooks=[],
        optim_wrapper__optimizer=dict(type='SGD', lr=0.1, momentum=0.9),
        randomness=dict(seed=5),
    )
    return config(folder, **{**options, **changes})
