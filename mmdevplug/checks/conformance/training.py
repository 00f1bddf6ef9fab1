"""Train a small model with the runner: in mixed precision, resumed, and on two ranks."""

import json
import os
import tempfile
from typing import Any, Dict, List

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, RUNNERS
from torch import Tensor, nn

from mmdevplug.accelerators.probe import difference
from mmdevplug.checks.collectives import examine as examine_collectives, run_job
from mmdevplug.errors import AcceleratorError
from mmdevplug.utils.model import unwrap_model

from .card import PRODUCT_TOLERANCE, Card, Failed, NotSupported, refuse, require

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

    def __len__(self) -> int:
        return ITERATIONS * GLOBAL_BATCH

    def __getitem__(self, index: int) -> Dict[str, Any]:
        numbers = torch.arange(3 * 8 * 8, dtype=torch.float32)
        image = torch.sin(numbers * (0.1 + 0.2 * (index % CLASSES)) + index)
        return dict(inputs=image.reshape(3, 8, 8), labels=index % CLASSES)


@MODELS.register_module()
class ConformanceModel(BaseModel):
    """A convolution, perhaps with batch normalization and dropout, and a linear layer."""

    def __init__(self, norm: bool = False, dropout: float = 0.0, **kwargs: Any) -> None:
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

    def forward(self, inputs: Tensor, labels: Tensor, mode: str = 'tensor') -> Any:
        scores = self.layers(inputs)
        return dict(loss=nn.functional.cross_entropy(scores, labels)) if mode == 'loss' else scores


class Losses(Hook):
    """Keep the losses of all iterations, on the device until the training has ended."""

    def __init__(self) -> None:
        self.kept: List[Tensor] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Keep the loss of an iteration."""
        self.kept.append(outputs['loss'].detach().float())


def train(
    card: Card, accelerator: Any, work_dir: str, ranks: int = 1, **changes: Any
) -> Dict[str, Any]:
    """Train the model on this rank's part of the data.

    ``accelerator`` and ``changes`` are keys of the config; ``ranks`` share a batch. The result has
    ``losses`` (Tensor) of this rank and ``weights`` by name, on the host.
    """
    card.say(f'training on {accelerator}')
    cfg = dict(
        default_scope='mmengine',
        experiment_name=os.path.basename(work_dir),
        work_dir=work_dir,
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
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9)),
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=ITERATIONS // 2)
        ),
        env_cfg=dict(dist_cfg=dict(timeout=card.asked['timeout'])),
        randomness=dict(seed=0),
        runner_type='DeviceRunner',
    )
    runner = RUNNERS.build(Config(dict(cfg, **changes)))
    losses = Losses()
    runner.register_hook(losses, priority='VERY_LOW')
    runner.train()
    weights = dict(unwrap_model(runner.model).state_dict())
    fetched = runner.device_context.accelerator.copies.to_host([*losses.kept, *weights.values()])
    return dict(
        losses=torch.stack(fetched[: len(losses.kept)]),
        weights=dict(zip(weights, fetched[len(losses.kept) :])),
    )


def _accelerator_key(card: Card) -> Dict[str, Any]:
    """The config key ``accelerator`` for the card."""
    given = card.cfg.get('accelerator') or {}
    given = dict(type=given) if isinstance(given, str) else dict(given)
    return dict(given, **card.options.device)


def check_mixed_precision(card: Card) -> str:
    """Train in mixed precision, and compare the losses with float32 on the CPU."""
    accelerator, device = card.accelerator, card.device
    inputs = torch.eye(4).to(device)
    try:
        with accelerator.precision.autocast():
            product = nn.functional.linear(inputs, inputs)
        dtype = accelerator.precision.dtype
        if product.dtype != dtype:
            raise Failed(f'autocast multiplies in {product.dtype}, not {dtype}')
        if dtype == torch.float16:
            accelerator.precision.grad_scaler()
    except AcceleratorError as error:
        raise NotSupported(str(error)) from error
    with tempfile.TemporaryDirectory(prefix='mmdevplug-conformance-') as folder:
        expected = train(card, 'cpu', os.path.join(folder, 'cpu'))
        found = train(
            card,
            _accelerator_key(card),
            os.path.join(folder, 'card'),
            optim_wrapper=dict(
                type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9)
            ),
        )
    apart = difference(found['losses'], expected['losses'])
    figure = require(apart, HALF_TOLERANCE, 'losses in mixed precision')
    return f'losses of {ITERATIONS} iterations in {product.dtype} differ by {figure}'


def check_resume(card: Card) -> str:
    """Compare a training that was resumed half way with one that was not interrupted."""
    accelerator = _accelerator_key(card)
    card.accelerator.manual_seed(0)
    reports = card.accelerator.shares_devices or card.accelerator.save_rng(card.device) is not None
    dropout = 0.3 if reports else 0.0
    changes = dict(model=dict(type='ConformanceModel', norm=True, dropout=dropout))
    with tempfile.TemporaryDirectory(prefix='mmdevplug-conformance-') as folder:
        whole = train(card, accelerator, os.path.join(folder, 'whole'), **changes)
        middle = os.path.join(folder, 'whole', f'iter_{ITERATIONS // 2}.pth')
        resumed = train(
            card,
            accelerator,
            os.path.join(folder, 'resumed'),
            load_from=middle,
            resume=True,
            **changes,
        )
    if len(resumed['losses']) != ITERATIONS - ITERATIONS // 2:
        raise Failed(f'the resumed training did {len(resumed["losses"])} iterations')
    figure = require(_weights_apart(resumed, whole), RESUME_TOLERANCE, 'weights after resuming')
    how = 'with dropout' if dropout else 'without dropout (the state of its generator is unknown)'
    return f'{how}, weights differ by {figure}'


def check_collectives(card: Card) -> str:
    """Run the doctor's test of collectives, averages of gradients among them, on two ranks."""
    card.need_ranks(RANKS)
    options = dict(accelerator=card.asked['accelerator'], config=card.asked['config'])
    card.say(f'collectives of {RANKS} ranks')
    findings = examine_collectives(RANKS, options, 1.0, 1, card.asked['timeout'])
    wrong = [finding.found for finding in findings if finding.level == 'error']
    if wrong:
        refuse('; '.join(wrong))
    return next(finding.found for finding in findings if finding.level == 'ok')


def check_two_ranks(card: Card) -> str:
    """Compare two ranks, each with half of a batch, with the CPU and the whole batch."""
    return _compare_two_ranks(card)


def check_sync_bn(card: Card) -> str:
    """The same with batch normalization, synchronized over the ranks."""
    model = dict(type='ConformanceModel', norm=True)
    return _compare_two_ranks(card, model=model, sync_bn='auto')


def _compare_two_ranks(card: Card, **changes: Any) -> str:
    card.need_ranks(RANKS)
    arguments = dict(asked=card.asked, accelerator=_accelerator_key(card), changes=changes)
    found, failures = run_job(
        RANKS,
        'mmdevplug.checks.conformance.job',
        ['--options', json.dumps(arguments)],
        card.asked['timeout'],
        card.say,
    )
    if found is None:
        refuse('; '.join(failures))
    with tempfile.TemporaryDirectory(prefix='mmdevplug-conformance-') as folder:
        expected = train(card, 'cpu', os.path.join(folder, 'cpu'), **changes)
    losses = difference(torch.tensor(found['losses']), expected['losses'])
    found['weights'] = {name: torch.tensor(each) for name, each in found['weights'].items()}
    weights = _weights_apart(found, expected)
    return (
        f'{RANKS} ranks on {", ".join(found["devices"])}, backend {found["backend"]!r}: losses '
        f'differ from one process with the whole batch on the CPU by '
        f'{require(losses, PRODUCT_TOLERANCE, "losses")}, weights by '
        f'{require(weights, PRODUCT_TOLERANCE, "weights")}'
    )


def _weights_apart(found: Dict[str, Any], expected: Dict[str, Any]) -> float:
    if found['weights'].keys() != expected['weights'].keys():
        return float('inf')
    return max(
        difference(found['weights'][name], value) for name, value in expected['weights'].items()
    )
