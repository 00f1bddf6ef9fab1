"""Trainings with clipping, accumulation and mixed precision, run the same way on any device."""

import os

import torch
from mmengine.hooks import Hook
from mmengine.registry import MODELS, RUNNERS
from mmengine.runner.amp import autocast  # bound before any runner exists, as models have it
from torch import nn

from mmdevplug.examples.digits import DigitsClassifier
from tests.jobs import (
    PLAIN,
    cpu_pools_bfloat16,
    digits_config,
    install_card,
    largest_difference,
    trained_weights,
)

#: 22 iterations each; what they do to MMEngine's `optim_wrapper`.
SCENARIOS = {
    'clip_by_norm': dict(clip_grad=dict(max_norm=0.2)),
    'clip_by_largest': dict(clip_grad=dict(max_norm=0.03, norm_type='inf')),
    'clip_by_value': dict(clip_grad=dict(type='value', clip_value=0.01)),
    'accumulation': dict(accumulative_counts=4),
    'accumulation_and_clip': dict(accumulative_counts=4, clip_grad=dict(max_norm=0.2)),
}
#: Casting to bfloat16 loses bits in another order when a batch is split.
BFLOAT16 = dict(type='AmpOptimWrapper', dtype='bfloat16', clip_grad=dict(max_norm=0.2))


class Watch(Hook):
    """Notes what each iteration left behind."""

    priority = 'LOWEST'

    def __init__(self):
        self.scales, self.weights = [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
        self.scales.append(None if scaler is None else scaler.get_scale())
        model = getattr(runner.model, 'module', runner.model)
        self.weights.append(model.head.weight.detach().cpu().clone())

    def unchanged(self):
        """The iterations that left the weights as they were."""
        pairs = zip(self.weights, self.weights[1:])
        return [index for index, (old, new) in enumerate(pairs, 1) if torch.equal(old, new)]


def config(accelerator, work_dir, optim_wrapper=None, **options):
    """The digits example with another optimizer wrapper and a global batch of 128."""
    options = {**PLAIN, 'model__channels': 8, 'default_hooks__logger__interval': 1, **options}
    options['train_dataloader__batch_size'] = 128 // int(os.environ.get('WORLD_SIZE', 1))
    cfg = digits_config(accelerator, work_dir, **options)
    for key, value in (optim_wrapper or {}).items():
        cfg.optim_wrapper[key] = value
    return cfg


def train(accelerator, work_dir, optim_wrapper=None, watch=False, **options):
    """Train the digits example.

    Returns:
        dict: ``weights``, ``norms`` (every logged norm of the gradients, None if there is none),
        ``wrapper`` (type name of the optimizer wrapper); with ``watch`` also ``scales`` after
        each iteration and the iterations that left the weights ``unchanged``.
    """
    install_card(accelerator)
    runner = RUNNERS.build(config(accelerator, work_dir, optim_wrapper, **options))
    watching = Watch()
    if watch:
        runner.register_hook(watching)
    runner.train()
    norms = runner.message_hub.log_scalars.get('train/grad_norm')
    return dict(
        weights=trained_weights(runner),
        norms=None if norms is None else norms.data[0],
        wrapper=type(runner.optim_wrapper).__name__,
        scales=watching.scales,
        unchanged=watching.unchanged(),
    )


def train_all(accelerator, work_dir):
    """Every scenario, one after the other in the same processes."""
    scenarios = {**SCENARIOS, 'bfloat16': BFLOAT16} if cpu_pools_bfloat16() else SCENARIOS
    return {
        name: train(accelerator, f'{work_dir}/{name}', optim_wrapper, experiment_name=name)
        for name, optim_wrapper in scenarios.items()
    }


@MODELS.register_module()
class OverflowingClassifier(DigitsClassifier):
    """Has an infinite loss on rank 1 in the iteration ``at``, counted from 0."""

    def __init__(self, at=5, **kwargs):
        super().__init__(**kwargs)
        self.at, self.calls = at, 0

    def forward(self, inputs, labels=None, mode='tensor'):
        outputs = super().forward(inputs, labels, mode)
        if mode == 'loss':
            if self.calls == self.at and os.environ.get('RANK', '1') == '1':
                outputs = dict(loss=outputs['loss'] * float('inf'))
            self.calls += 1
        return outputs


def overflow(accelerator, work_dir, **optim_wrapper):
    """Train an epoch with a scaler; the loss of a rank is infinite in its sixth iteration."""
    scaled = dict(type='AmpOptimWrapper', loss_scale=dict(init_scale=256.0), **optim_wrapper)
    return train(
        accelerator, work_dir, scaled, watch=True,
        train_cfg__max_epochs=1, model__type='OverflowingClassifier',
    )  # fmt: skip


def check_skipped(results):
    """Assert that all ranks skipped the step of that iteration, and halved the scale."""
    for result in results:
        assert result['unchanged'] == [5]
        assert result['scales'] == [256.0] * 5 + [128.0] * 6
        assert largest_difference(result['weights'], results[0]['weights']) == 0.0


@MODELS.register_module()
class CastingClassifier(DigitsClassifier):
    """Takes mixed precision into its own hands, and notes what it got."""

    def forward(self, inputs, labels=None, mode='tensor'):
        weight = nn.functional.linear
        if mode == 'loss':
            flat = inputs.flatten(1)
            with autocast():
                on = weight(flat, flat).dtype
            with autocast(enabled=False):
                off = weight(flat, flat).dtype
            with autocast(dtype=torch.bfloat16):
                named = weight(flat, flat).dtype
                with autocast():
                    inside = weight(flat, flat).dtype
                with autocast(enabled=False):
                    off_inside = weight(flat, flat).dtype
            self.found = [str(dtype) for dtype in (on, off, named, inside, off_inside)]
        return super().forward(inputs, labels, mode)


def cast_inside(accelerator, work_dir, **options):
    """What CastingClassifier found in a run of one iteration."""
    install_card(accelerator)
    options = dict(model__type='CastingClassifier', train_cfg__max_epochs=1, **options)
    runner = RUNNERS.build(config(accelerator, work_dir, **options))
    runner.train()
    return getattr(runner.model, 'module', runner.model).found
