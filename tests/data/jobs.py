"""Small trainings of users who made a mistake, each in its own place."""

import os

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.registry import DATASETS, METRICS, RUNNERS

from tests.hooks.memory_jobs import config


@METRICS.register_module(force=True)
class Counted(BaseMetric):
    """How many samples were seen."""

    def process(self, data_batch, data_samples):
        self.results.extend(data_samples)

    def compute_metrics(self, results):
        return dict(seen=len(results))


@DATASETS.register_module(force=True)
class Some(BaseDataset):
    """``count`` samples, and on one rank ``bad`` of them."""

    def __init__(self, count=16, bad=None, rank=-1, **kwargs):
        here = rank in (-1, int(os.environ.get('RANK', 0)))  # -1 is all of them
        self.count = bad if bad is not None and here else count
        super().__init__(**kwargs)

    def load_data_list(self):
        return [dict(inputs=np.ones(8, dtype=np.float32), crowded=True)] * self.count

    def filter_data(self):
        if not (self.filter_cfg or {}).get('leave_crowded_out'):
            return self.data_list
        return [one for one in self.data_list if not one['crowded']]

    def prepare_data(self, idx):
        return dict(inputs=torch.ones(8))


def build(work_dir, accelerator='cpu', model=None, hooks=(), dataset=None, epochs=None, **cfg):
    """A runner with a validation."""
    made = config(work_dir, accelerator, hooks, iterations=3, batch_size=4, model=model or {})
    made['train_dataloader']['dataset'] = dict(dict(type='Some'), **(dataset or {}))
    made['val_dataloader'] = dict(
        made['train_dataloader'],
        sampler=dict(type='DefaultSampler', shuffle=False),
        dataset=dict(type='Some', count=4),
    )
    made['val_evaluator'], made['val_cfg'] = dict(type='Counted'), dict()
    made['train_cfg']['val_interval'] = 3
    if epochs is not None:
        made['train_cfg'] = dict(by_epoch=True, max_epochs=epochs, val_interval=epochs)
        made['train_dataloader']['sampler'] = dict(type='DefaultSampler', shuffle=True)
        made['log_processor'] = dict(by_epoch=True)
    for key, value in cfg.items():
        made[key] = dict(made.get(key) or {}, **value) if isinstance(value, dict) else value
    return RUNNERS.build(Config(made))


def train(*args, **kwargs):
    """Train, and return the metrics of the last validation."""
    runner = build(*args, **kwargs)
    runner.train()
    seen = runner.message_hub.log_scalars.get('val/seen')
    return None if seen is None else seen.current()
