"""Small trainings, some with a leak."""

import os
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, MODELS, RUNNERS
from torch import nn

from mmdevplug.hooks import memory_hook
from tests.columns import backend_of
from tests.jobs import install_card, log_of

ITERATIONS = 140


@DATASETS.register_module(force=True)
class Ones(BaseDataset):
    """As many equal samples as one asks for."""

    def load_data_list(self):
        return [dict(inputs=torch.ones(8)) for _ in range(64)]

    def prepare_data(self, idx):
        return dict(inputs=self.get_data_info(idx)['inputs'])


@DATASETS.register_module(force=True)
class KeptOnes(Ones):
    """Keeps half a megabyte for each sample, as a cache of decoded pictures does."""

    def __init__(self, **kwargs):
        self.kept = []
        super().__init__(**kwargs)

    def prepare_data(self, idx):
        self.kept.append(bytearray(b'x' * 500_000))
        return super().prepare_data(idx)


@MODELS.register_module(force=True)
class Small(BaseModel):
    """A layer, whose width says how much memory a batch takes."""

    def __init__(self, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, inputs, mode='tensor'):
        outputs = self.net(inputs)
        if mode == 'loss':
            return dict(loss=(outputs**2).mean(), loss_aux=outputs.detach().mean())
        if mode == 'predict':
            return [dict(value=float(one)) for one in outputs]
        return outputs


@HOOKS.register_module(force=True)
class KeepTensors(Hook):
    """Puts a tensor into a list in each iteration."""

    def __init__(self):
        self.kept = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        device = next(runner.model.parameters()).device
        self.kept.append(torch.zeros(300, 300, device=device) + 1)


def config(work_dir, accelerator='cpu', hooks=(), iterations=ITERATIONS, **options):
    """A config; ``options`` are of ``accelerator``, those of the model are in ``model``."""
    model = options.pop('model', {})
    batch_size = options.pop('batch_size', 2)
    dataset = options.pop('dataset', 'Ones')
    workers = options.pop('workers', 0)
    checkpoint_interval = options.pop('checkpoint_interval', 10**6)
    loader = dict(
        batch_size=batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=dict(type='default_collate'),
        sampler=dict(type='InfiniteSampler', shuffle=True),
        dataset=dict(type=dataset),
    )
    return dict(
        runner_type='DeviceRunner',
        accelerator=dict(dict(type=accelerator, backend=backend_of(accelerator)), **options),
        work_dir=str(work_dir),
        # Runs of one process that begin in the same second would share a log otherwise.
        experiment_name=Path(work_dir).name,
        launcher='pytorch' if 'RANK' in os.environ else 'none',
        default_scope='mmengine',
        model=dict(dict(type='Small'), **model),
        train_dataloader=loader,
        train_cfg=dict(by_epoch=False, max_iters=iterations, val_interval=10**6),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='Adam', lr=1e-3)),
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=10),
            checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=checkpoint_interval),
        ),
        log_processor=dict(by_epoch=False),
        custom_hooks=[dict(hook) for hook in hooks],
        randomness=dict(seed=1),
        env_cfg=dict(dist_cfg=dict(timeout=60)),
    )


def build(*args, **kwargs):
    """A runner."""
    memory_hook.SAMPLE_INTERVAL = 5
    cfg = config(*args, **kwargs)
    install_card(cfg['accelerator']['type'])
    return RUNNERS.build(Config(cfg))


def train_all(work_dir, accelerator, cases):
    """Train once for each case, in this process; return logs."""
    logs = {}
    for name, options in cases.items():
        build(work_dir / name, accelerator, **options).train()
        logs[name] = log_of(work_dir / name)
    return logs
