"""Runs that are interrupted and resumed, and what they end with."""

import os
import random

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS, METRICS, MODELS, RUNNERS
from torch import nn
from torch.utils.data import RandomSampler

import mmdevplug
from tests.columns import backend_of
from tests.jobs import install_card, largest_difference, trained_weights, weights_of

SAMPLES = 52


@DATASETS.register_module(force=True)
class NoisyDataset(BaseDataset):
    """Samples to which noise of all three generators is added when they are loaded."""

    def load_data_list(self):
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(SAMPLES, 8, generator=generator)
        targets = inputs[:, :2].sin() * 2
        return [dict(inputs=x.numpy(), targets=y.numpy()) for x, y in zip(inputs, targets)]

    def prepare_data(self, idx):
        data = self.get_data_info(idx)
        noise = np.random.rand() + random.random() + torch.rand(1).item()
        return dict(inputs=data['inputs'] * np.float32(1 + 0.1 * noise), targets=data['targets'])


@MODELS.register_module(force=True)
class NoisyModel(BaseModel):
    """A small network with dropout and batch normalization; some layers, for several buckets."""

    def __init__(self, width=16, dropout=0.2, norm=True, bias=True, **kwargs):
        super().__init__(**kwargs)
        self.net = nn.Sequential(
            nn.Linear(8, width, bias=bias),
            *([nn.BatchNorm1d(width)] if norm else []),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width, bias=bias),
            nn.Tanh(),
            nn.Linear(width, 2, bias=bias),
        )

    def forward(self, inputs, targets=None, mode='tensor'):
        outputs = self.net(inputs)
        if mode == 'loss':
            return dict(loss=nn.functional.mse_loss(outputs, targets))
        if mode == 'predict':
            errors = (outputs - targets).abs().mean(dim=1)
            return [dict(error=error) for error in errors.unbind()]
        return outputs


@METRICS.register_module(force=True)
class MeanError(BaseMetric):
    """The mean absolute error, and the largest."""

    def process(self, data_batch, data_samples):
        self.results += [float(sample['error']) for sample in data_samples]

    def compute_metrics(self, results):
        return dict(loss_error=sum(results) / len(results), most_error=max(results))


@HOOKS.register_module(force=True)
class DieAt(Hook):
    """Ends the process without a word at the end of an iteration, or once it has begun to save."""

    priority = 'LOWEST'

    def __init__(self, iteration, rank=0):
        self.iteration, self.rank = iteration, rank

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.iteration and runner.rank == self.rank:
            os._exit(9)


@HOOKS.register_module(force=True)
class DieBeforeVal(Hook):
    """Ends the process between an epoch and its validation."""

    def __init__(self, epoch):
        self.epoch = epoch

    def before_val(self, runner):
        if runner.epoch == self.epoch:
            os._exit(9)


@DATA_SAMPLERS.register_module(force=True)
class GlobalRandomSampler(RandomSampler):
    """PyTorch's, as MMEngine builds samplers."""

    def __init__(self, dataset, seed=None, shuffle=True):
        super().__init__(dataset)


def loader(**changes):
    """A config of a data loader."""
    found = dict(
        batch_size=4,
        num_workers=0,
        drop_last=True,
        collate_fn=dict(type='default_collate'),
        sampler=dict(type='DefaultSampler', shuffle=True),
        dataset=dict(type='NoisyDataset'),
    )
    return dict(found, **changes)


def config(work_dir, accelerator='cpu', by_epoch=True, length=None, checkpoint=None, **changes):
    """A config; ``length`` is in epochs or in iterations."""
    sampler = dict(type='DefaultSampler' if by_epoch else 'InfiniteSampler', shuffle=True)
    length = length or (4 if by_epoch else 24)
    train_cfg = dict(by_epoch=True, max_epochs=length, val_interval=1)
    if not by_epoch:
        train_cfg = dict(by_epoch=False, max_iters=length, val_interval=6)
    cfg = dict(
        runner_type='DeviceRunner',
        accelerator=dict(type=accelerator, backend=backend_of(accelerator)),
        work_dir=str(work_dir),
        launcher='pytorch' if 'RANK' in os.environ else 'none',
        default_scope='mmengine',
        model=dict(type='NoisyModel'),
        train_dataloader=loader(sampler=sampler),
        val_dataloader=loader(drop_last=False, sampler=dict(type='DefaultSampler', shuffle=False)),
        val_evaluator=dict(type='MeanError'),
        train_cfg=train_cfg,
        val_cfg=dict(),
        optim_wrapper=dict(
            type='OptimWrapper',
            optimizer=dict(type='AdamW', lr=0.02),
            clip_grad=dict(max_norm=1.0),
        ),
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=8),
            dict(type='CosineAnnealingLR', by_epoch=by_epoch, T_max=length),
        ],
        default_hooks=dict(
            logger=dict(type='LoggerHook', interval=5),
            checkpoint=dict(type='SafeCheckpointHook', **(checkpoint or dict(interval=1))),
        ),
        custom_hooks=[dict(type='EMAHook', momentum=0.1)],
        randomness=dict(seed=5, diff_rank_seed=True),
        env_cfg=dict(dist_cfg=dict(timeout=60)),
        log_level='WARNING',
    )
    for key, value in changes.items():
        target = cfg
        *path, last = key.split('__')
        for part in path:
            target = target[part]
        target[last] = value
    return cfg


#: Options of a runner that tests.
TESTED = dict(
    test_dataloader=config('')['val_dataloader'],
    test_evaluator=dict(type='MeanError'),
    test_cfg=dict(),
    custom_hooks=[],
)


def build(work_dir, accelerator='cpu', **options):
    install_card(accelerator)
    mmdevplug.follow_runner_type()  # as a base config does
    return RUNNERS.build(Config(config(work_dir, accelerator, **options)))


def train(work_dir, accelerator='cpu', **options):
    """Train.

    Returns:
        dict: ``weights`` and ``ema`` (name to array), ``iter``, ``lr``, ``draws`` of the
        generators after training.
    """
    runner = build(work_dir, accelerator, **options)
    runner.train()
    ema = [hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model')]
    best = runner.message_hub.runtime_info.get('best_score')
    return dict(
        weights=trained_weights(runner),
        ema=weights_of(ema[0]) if ema else {},
        iter=runner.iter,
        lr=runner.optim_wrapper.get_lr()['lr'],
        draws=[random.random(), float(np.random.rand()), torch.rand(1).item()],
        best=None if best is None else float(best),
    )


def train_or_die(accelerator, work_dir, stop_at=None, **options):
    """Train twelve iterations with averaged weights and clipping, perhaps until a rank dies."""
    hooks = [dict(type='EMAHook', momentum=0.1)]
    if stop_at is not None:
        hooks.append(dict(type='DieAt', iteration=stop_at))
    checkpoint = dict(interval=3, by_epoch=False)
    options.update(by_epoch=False, length=12, checkpoint=checkpoint, custom_hooks=hooks)
    return train(work_dir, accelerator, **options)


def assert_equal_bits(one, other):
    """Compare what :func:`train` returned on the ranks of two jobs."""
    assert len(one) == len(other)
    for mine, theirs in zip(one, other):
        assert largest_difference(mine['weights'], theirs['weights']) == 0.0
        assert largest_difference(mine['ema'], theirs['ema']) == 0.0
        for name in ('iter', 'lr', 'draws', 'best'):
            assert mine[name] == theirs[name], name
