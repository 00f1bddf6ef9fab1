"""A training whose samples are written down, on any number of ranks; see `test_elastic_hosts`."""

import json
import os
import time
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS

from tests.checkpoint.training import NoisyDataset, config

#: Samples of an epoch, and of an iteration on a rank.
SAMPLES, STEP = 32, 2


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
        samples = [round(float(one), 5) for one in data_batch['targets'][:, 0]]
        line = dict(time=time.time(), ranks=runner.world_size, iteration=runner.iter)
        with open(str(self.folder / f'{runner.rank} {os.getpid()}'), 'a') as file:
            file.write(json.dumps(dict(line, samples=samples)) + '\n')


def whole_config(folder, **changes):
    """The config of a short training in which nothing is random."""
    options = dict(
        by_epoch=True,
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
