"""Train a small model with the runner: in mixed precision, resumed, and on two ranks."""

import os

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, RUNNERS
from torch import nn

from mmdevplug.errors import AcceleratorError
from mmdevplug.utils.model import unwrap_model
from tests.conformance.card import PRODUCT_TOLERANCE
from tests.difference import difference

RANKS = 2
ITERATIONS = 6
GLOBAL_BATCH = 8
CLASSES = 4
#: Of losses in half precision, relative to those of float32 on the CPU.
HALF_TOLERANCE = 5e-2
#: Of weights after a resumed training, which repeats the same operations.
RESUME_TOLERANCE = 1e-6


@DATASETS.register_module()
class ConformanceImages:
    """Images of 3 by 8 by 8 sine values, each with a label."""

    def __len__(self):
        return ITERATIONS * GLOBAL_BATCH

    def __getitem__(self, index):
        numbers = torch.arange(3 * 8 * 8, dtype=torch.float32)
        image = torch.sin(numbers * (0.1 + 0.2 * (index % CLASSES)) + index)
        return dict(inputs=image.reshape(3, 8, 8), labels=index % CLASSES)


@MODELS.register_module()
class ConformanceModel(BaseModel):
    """A convolution, perhaps with batch normalization and dropout, and a linear layer."""

    def __init__(self, norm=False, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            *([nn.BatchNorm2d(8)] if norm else []),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(8 * 16, CLASSES),
        )

    def forward(self, inputs, labels, mode='tensor'):
        scores = self.layers(inputs)
        return dict(loss=nn.functional.cross_entropy(scores, labels)) if mode == 'loss' else scores


class Losses(Hook):
    """Keep the losses of all iterations, on the device until the training has ended."""

    def __init__(self):
        self.kept = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.kept.append(outputs['loss'].detach().float())


def train(accelerator, work_dir, **changes):
    """Train on this rank's part of the data, with changes of the config.

    The result has the losses of this rank and the weights, on the host.
    """
    ranks = int(os.environ.get('WORLD_SIZE', 1))
    sgd = dict(type='SGD', lr=0.1, momentum=0.9)
    cfg = dict(
        default_scope='mmengine',
        experiment_name=work_dir.name,
        work_dir=str(work_dir),
        launcher='pytorch' if ranks > 1 else 'none',
        accelerator=accelerator,
        model=dict(type='ConformanceModel'),
        train_dataloader=dict(
            batch_size=GLOBAL_BATCH // ranks,
            num_workers=0,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate'),
            dataset=dict(type='ConformanceImages'),
        ),
        train_cfg=dict(by_epoch=False, max_iters=ITERATIONS),
        optim_wrapper=dict(type='OptimWrapper', optimizer=sgd),
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=ITERATIONS // 2)
        ),
        randomness=dict(seed=0),
        runner_type='DeviceRunner',
    )
    runner = RUNNERS.build(Config(dict(cfg, **changes)))
    losses = Losses()
    runner.register_hook(losses, priority='VERY_LOW')
    runner.train()
    weights = dict(unwrap_model(runner.model).state_dict())
    accelerator = runner.device_context.accelerator
    fetched = accelerator.copies.to_host([*losses.kept, *weights.values()])
    return dict(
        losses=torch.stack(fetched[: len(losses.kept)]),
        weights=dict(zip(weights, fetched[len(losses.kept) :])),
    )


def weights_apart(found, expected):
    assert found['weights'].keys() == expected['weights'].keys()
    return max(
        difference(found['weights'][name], value) for name, value in expected['weights'].items()
    )


def train_in_half_precision(card, folder):
    precision, inputs = card.accelerator.precision, torch.eye(4).to(card.device)
    try:
        with precision.autocast():
            product = nn.functional.linear(inputs, inputs)
        if precision.dtype == torch.float16:
            precision.grad_scaler()
    except AcceleratorError as error:
        pytest.skip(str(error))
    assert product.dtype == precision.dtype
    sgd = dict(type='SGD', lr=0.1, momentum=0.9)
    return train(
        card.key, folder / 'card', optim_wrapper=dict(type='AmpOptimWrapper', optimizer=sgd)
    )


def test_mixed_precision(asked, tmp_path):
    """Losses with autocast are near those of float32 on the CPU."""
    (found,) = asked.run(train_in_half_precision, tmp_path)
    (expected,) = asked.run(on_cpu_with, tmp_path, {})
    assert difference(found['losses'], expected['losses']) <= HALF_TOLERANCE


def train_and_resume(card, folder):
    card.accelerator.manual_seed(0)
    reports = card.accelerator.shares_devices or card.accelerator.save_rng(card.device) is not None
    model = dict(type='ConformanceModel', norm=True, dropout=0.3 if reports else 0.0)
    whole = train(card.key, folder / 'whole', model=model)
    middle = str(folder / 'whole' / f'iter_{ITERATIONS // 2}.pth')
    again = train(card.key, folder / 'again', load_from=middle, resume=True, model=model)
    return whole, again


def test_resume(asked, tmp_path):
    """A training that was resumed half way ends where one that was not interrupted does."""
    ((whole, resumed),) = asked.run(train_and_resume, tmp_path)
    assert len(resumed['losses']) == ITERATIONS - ITERATIONS // 2
    assert weights_apart(resumed, whole) <= RESUME_TOLERANCE


def need_devices(card):
    count = card.accelerator.device_count()
    shared = card.accelerator.shares_devices or card.options.backend == 'gloo'
    ranks = int(os.environ['WORLD_SIZE'])
    if count < ranks and not shared:
        pytest.skip(f'{ranks} ranks need {ranks} devices, and {count} is here')


def train_as_rank(card, folder, changes):
    need_devices(card)
    return train(card.key, folder / 'ranks', **changes)


def on_cpu_with(card, folder, changes):
    return train('cpu', folder / 'cpu', **changes)


NORM = dict(model=dict(type='ConformanceModel', norm=True), sync_bn='auto')


@pytest.mark.parametrize('changes', [{}, NORM], ids=['plain', 'synchronized batch norm'])
def test_training_on_two_ranks(asked, tmp_path, changes):
    """Two ranks, each with half of a batch, do what one does with the whole batch on the CPU."""
    ranks = asked.run(train_as_rank, tmp_path, changes, ranks=RANKS)
    (expected,) = asked.run(on_cpu_with, tmp_path, changes)
    losses = torch.stack([found['losses'] for found in ranks]).mean(0)
    assert difference(losses, expected['losses']) <= PRODUCT_TOLERANCE
    for found in ranks:
        assert weights_apart(found, expected) <= PRODUCT_TOLERANCE
