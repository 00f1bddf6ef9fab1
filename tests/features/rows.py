"""The rows of the feature table: what is trained, and how closely it has to agree."""

import copy
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Tuple

from tests.columns import NATIVE, backend_of
from tests.jobs import torch_before

STEPS = 20
GLOBAL_BATCH = 64
STAGED = ('zeta', 'xla', 'gcu', 't20')
LAZY = ('xla', 'gcu', 't20', 'lazy')


@dataclass
class Row:
    """A feature.

    Attributes:
        title (str): What docs call it, in English.
        title_zh (str): The same in Chinese.
        options (dict): Changes to :func:`base_config`.
        tolerance (float): The largest difference of a weight from the reference.
        reference (dict): Changes for the single process alone, instead of ``options``.
        refused_on (tuple): Accelerators on which the runner has to refuse it.
        absent_on (tuple): Accelerators that have no such feature.
    """

    title: str
    title_zh: str
    options: Dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    reference: Any = None
    refused_on: Tuple[str, ...] = ()
    absent_on: Tuple[str, ...] = ()


def _optimizer(**options):
    return dict(type='SGD', lr=0.05, momentum=0.9, **options)


def _optim_wrapper(**options):
    return dict(optim_wrapper=dict(type='OptimWrapper', optimizer=_optimizer(), **options))


def _compressed(kind):
    wrapper = dict(type='DeviceDistributedDataParallel', grad_compression=kind)
    return dict(model_wrapper_cfg=wrapper)


def _validation(**options):
    loader = dict(
        batch_size=15,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='default_collate'),
        # Not a multiple of anything: ranks get different numbers of samples.
        dataset=dict(type='DigitsDataset', split='test', indices=101),
    )
    return dict(
        val_dataloader=loader,
        val_cfg=dict(),
        val_evaluator=[
            dict(type='OrderedScores', prefix='cpu', collect_device='cpu'),
            dict(type='OrderedScores', prefix='gpu', collect_device='gpu'),
        ],
        val_interval=STEPS // 2,
        **options,
    )


def _children(first, second):
    return dict(
        constructor='EachChild',
        **{
            first: dict(type='OptimWrapper', optimizer=_optimizer()),
            second: dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3)),
        },
    )


SCHEDULERS = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=STEPS // 2),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=STEPS // 2, T_max=STEPS // 2),
    dict(type='LinearMomentum', start_factor=0.5, by_epoch=False, end=STEPS),
]

ROWS = {
    'sgd': Row('SGD with momentum', '带动量的 SGD'),
    'adamw': Row(
        'AdamW',
        'AdamW',
        dict(optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=2e-3))),
    ),
    'clip_norm': Row(
        'clipping by norm', '按范数裁剪', _optim_wrapper(clip_grad=dict(max_norm=0.5))
    ),
    'clip_value': Row(
        'clipping by value',
        '按值裁剪',
        _optim_wrapper(clip_grad=dict(type='value', clip_value=0.01)),
    ),
    'accumulation': Row(
        'accumulation over 4 iterations', '4 次迭代累积', _optim_wrapper(accumulative_counts=4)
    ),
    'ema': Row(
        'EMA, swapped in for validation',
        'EMA（验证时换入）',
        _validation(custom_hooks=[dict(type='EMAHook', momentum=0.1)]),
    ),
    'amp': Row(
        'mixed precision in bfloat16',
        'bfloat16 混合精度',
        dict(
            optim_wrapper=dict(
                type='AmpOptimWrapper', dtype='bfloat16', optimizer=_optimizer()
            )
        ),  # fmt: skip
        absent_on=('lazy',),
        tolerance=3e-2,  # bfloat16 keeps 8 bits; from float32 the CPU itself is 2e-2 away
    ),
    'sync_bn': Row(
        'synchronized batch normalization',
        '同步批归一化',
        dict(model=dict(type='FeatureNet', norm=True), sync_bn='auto'),
    ),
    'checkpoint_reentrant': Row(
        'gradient checkpointing, reentrant',
        '梯度检查点（可重入）',
        dict(model=dict(type='FeatureNet', with_cp='reentrant')),
    ),
    'checkpoint': Row(
        'gradient checkpointing, not reentrant',
        '梯度检查点（不可重入）',
        dict(model=dict(type='FeatureNet', with_cp='non-reentrant')),
    ),
    'activation_checkpointing': Row(
        "MMEngine's `activation_checkpointing`",
        'MMEngine 的 `activation_checkpointing`',
        dict(activation_checkpointing=['block']),
    ),
    'unused': Row(
        '`find_unused_parameters`',
        '`find_unused_parameters`',
        dict(model=dict(type='FeatureNet', branches=True), find_unused_parameters=True),
    ),
    'anomalous': Row(
        '`detect_anomalous_params`',
        '`detect_anomalous_params`',
        dict(
            model=dict(type='FeatureNet', branches=True),
            model_wrapper_cfg=dict(
                type='MMDistributedDataParallel',
                find_unused_parameters=True,
                detect_anomalous_params=True,
            ),
        ),
    ),
    'gan': Row(
        'GAN: `MMSeparateDistributedDataParallel`, `OptimWrapperDict`',
        'GAN:`MMSeparateDistributedDataParallel`、`OptimWrapperDict`',
        dict(
            model=dict(type='TinyGAN'),
            dataset='LatentDigits',
            model_wrapper_cfg=dict(type='MMSeparateDistributedDataParallel'),
            optim_wrapper=_children('generator', 'discriminator'),
        ),
    ),
    'two_optimizers': Row(
        'two optimizers, one loss',
        '两个优化器，一个损失',
        dict(
            model=dict(type='TwoOptimizers'),
            model_wrapper_cfg=dict(type='MMSeparateDistributedDataParallel'),
            optim_wrapper=dict(
                _children('stem', 'head'), block=dict(type='OptimWrapper', optimizer=_optimizer())
            ),
        ),
    ),
    'sync_buffers': Row(
        '`SyncBuffersHook`',
        '`SyncBuffersHook`',
        _validation(
            model=dict(type='FeatureNet', center=True),
            custom_hooks=[dict(type='SyncBuffersHook')],
        ),
    ),
    'schedulers': Row(
        'schedules of learning rate and momentum, by iteration',
        '按迭代调整学习率与动量',
        dict(param_scheduler=SCHEDULERS),
    ),
    'collect_results': Row(
        "metrics of device tensors, `collect_device='cpu'` and `'gpu'`",
        "以设备张量计算的指标，`collect_device='cpu'` 与 `'gpu'`",
        _validation(),
    ),
    'grad_bf16': Row(
        "`grad_compression='bf16'`",
        "`grad_compression='bf16'`",
        _compressed('bf16'),
        tolerance=2e-2,  # 8 bits of each gradient
    ),
    'compile': Row(
        '`torch.compile` (`compile=True`)',
        '`torch.compile`(`compile=True`)',
        dict(compile=dict(backend='aot_eager')),
        reference={},
        # That of 2.1 fails in PyTorch's own SGD; before 2.0 there is none.
        absent_on=(*STAGED, NATIVE, *(['cpu', 'cuda'] if torch_before('2.4.0') else [])),
    ),
    'zero': Row(
        '`ZeroRedundancyOptimizer`',
        '`ZeroRedundancyOptimizer`',
        dict(
            optim_wrapper=dict(
                type='OptimWrapper',
                optimizer=dict(
                    type='ZeroRedundancyOptimizer',
                    optimizer_type='SGD',
                    lr=0.05,
                    momentum=0.9,
                ),
            )
        ),
        reference={},
        refused_on=LAZY,
    ),
}  # fmt: skip


def base_config(accelerator, work_dir):
    """Plain training on the digits, for this process's launch variables."""
    ranks = int(os.environ.get('WORLD_SIZE', 1))
    return dict(
        model=dict(type='FeatureNet'),
        work_dir=str(work_dir),
        train_dataloader=dict(
            batch_size=GLOBAL_BATCH // ranks,
            num_workers=0,
            sampler=dict(type='InfiniteSampler', shuffle=True, seed=0),
            collate_fn=dict(type='default_collate'),
            dataset=dict(type='DigitsDataset', split='train'),
        ),
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=STEPS, val_interval=10**9),
        default_hooks=dict(checkpoint=None),
        launcher='pytorch' if 'RANK' in os.environ else 'none',
        accelerator=dict(
            type=accelerator, backend=backend_of(accelerator), initial_weights='host'
        ),
        default_scope='mmengine',
        randomness=dict(seed=0),
        log_level='WARNING',
        **_optim_wrapper(),
    )


def row_config(name, accelerator, work_dir, reference=False):
    """The config of a row on an accelerator."""
    from mmengine.config import ConfigDict

    row = ROWS[name]
    cfg = base_config(accelerator, Path(work_dir) / name)
    plain = reference and row.reference is not None
    options = copy.deepcopy(row.reference if plain else row.options)
    if 'dataset' in options:
        cfg['train_dataloader']['dataset']['type'] = options.pop('dataset')
    if 'val_interval' in options:
        cfg['train_cfg']['val_interval'] = options.pop('val_interval')
    cfg.update(options)
    cfg['experiment_name'] = f'{name}_{accelerator}'
    return ConfigDict(cfg)


def train_row(name, accelerator, work_dir, reference=False):
    """Train a row; see :func:`train_config`."""
    return train_config(row_config(name, accelerator, work_dir, reference))


def train_config(cfg, *hooks):
    """Train the config of a row.

    Returns:
        dict: The weights by name as arrays, with those of the EMA and what validations told.
    """
    import numpy as np
    from mmengine.runner.checkpoint import get_state_dict

    from mmdevplug.accelerators import enter_rank_device
    from mmdevplug.runner import DeviceRunner

    from .parts import KeepMetrics

    runner = DeviceRunner.from_cfg(cfg)
    metrics, told = KeepMetrics(), Told()
    for hook in (metrics, *hooks):
        runner.register_hook(hook)
    runner.logger.handlers[:] = [told]  # of many runners in one process, none prints
    runner.train()
    model = getattr(runner.model, 'module', runner.model)
    state = dict(get_state_dict(model))
    for hook in runner.hooks:
        if hasattr(hook, 'ema_model'):
            state.update({f'ema.{key}': v for key, v in hook.ema_model.state_dict().items()})
    fetched = enter_rank_device()[0].copies.to_host(list(state.values()))
    found = {key: value.float().numpy() for key, value in zip(state, fetched)}
    for number, told_metrics in enumerate(metrics.found):
        found.update(
            {f'val{number}/{key}': np.array(value) for key, value in told_metrics.items()}
        )
    return dict(weights=found, told=told.messages, wrapper=type(runner.model).__name__)


class Told(logging.Handler):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def train_rows(names, accelerator, work_dir, reference=False):
    """Train rows one after the other in this process.

    Returns:
        dict: For each row what :func:`train_row` returns, or ``error`` as (type, message).
    """
    from tests.jobs import install_card

    install_card(accelerator)
    found = {}
    for name in names:
        try:
            found[name] = train_row(name, accelerator, work_dir, reference)
        except Exception as error:
            logging.getLogger(__name__).warning('row %s', name, exc_info=True)
            found[name] = dict(error=(type(error).__name__, str(error)))
    return found
