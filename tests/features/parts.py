"""Small models, metrics and hooks for the rows of the feature table; they know no devices."""

from contextlib import ExitStack

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapperDict, build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from mmdevplug.examples.digits import DigitsDataset
from tests.jobs import checkpoint

LATENT = 8


@MODELS.register_module()
class FeatureNet(BaseModel):
    """A convolution, a block and a linear layer, with one peculiarity for each row that needs it.

    Args:
        norm (bool): Whether batch normalization follows the convolution.
        with_cp (str, optional): ``'reentrant'`` or ``'non-reentrant'``: checkpoint the block.
        branches (bool): Whether every other iteration takes another layer after the block, and a
            third layer is never used.
        center (bool): Whether a buffer follows the mean image, for predictions alone.
    """

    def __init__(self, norm=False, with_cp=None, branches=False, center=False):
        super().__init__(init_cfg=dict(type='Xavier', layer=['Conv2d', 'Linear']))
        self.stem = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4) if norm else nn.Identity(),
            nn.ReLU(),
        )
        self.block = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.head = nn.Linear(16, 10)
        self.with_cp = with_cp
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) if branches else None
        self.calls = 0
        if center:
            self.register_buffer('center', torch.zeros(1, 1, 8, 8))
        self.has_center = center

    def features(self, inputs):
        features = self.stem(inputs)
        if self.with_cp and features.requires_grad:
            reentrant = self.with_cp == 'reentrant'
            features = checkpoint(self.block, features, use_reentrant=reentrant)
        else:
            features = self.block(features)
        if self.branches is not None:
            features = features + self.branches[self.calls % 2](features)
            self.calls += self.training
        return features

    def forward(self, inputs, labels=None, mode='tensor'):
        if self.has_center and mode == 'loss':
            with torch.no_grad():
                self.center.lerp_(inputs.mean(dim=0, keepdim=True), 0.1)
        if self.has_center and mode == 'predict':
            inputs = inputs - self.center
        scores = self.head(self.features(inputs))
        if mode == 'loss':
            return dict(loss=cross_entropy(scores.float(), labels))
        if mode == 'predict':
            return [dict(scores=one, label=label) for one, label in zip(scores, labels)]
        return scores


@MODELS.register_module()
class TwoOptimizers(FeatureNet):
    """A model with an optimizer for each child and one loss, in MMEngine's own style."""

    def train_step(self, data, optim_wrapper):
        data = self.data_preprocessor(data, training=True)
        with ExitStack() as stack:
            for name, wrapper in optim_wrapper.items():
                stack.enter_context(wrapper.optim_context(getattr(self, name)))
            losses = self(**data, mode='loss')
        loss, log_vars = self.parse_losses(losses)
        loss.backward()
        for wrapper in optim_wrapper.values():
            wrapper.step()
            wrapper.zero_grad()
        return log_vars


@DATASETS.register_module()
class LatentDigits(DigitsDataset):
    """The digits, each with its own noise."""

    def prepare_data(self, idx):
        latent = np.random.RandomState(idx).randn(LATENT).astype(np.float32)
        return dict(inputs=super().prepare_data(idx)['inputs'], latent=latent)


def set_requires_grad(module, requires_grad):
    for parameter in module.parameters():
        parameter.requires_grad = requires_grad


@MODELS.register_module()
class TinyGAN(BaseModel):
    """A generator and a discriminator that take turns, as in OpenMMLab's GANs."""

    def __init__(self):
        super().__init__(init_cfg=dict(type='Xavier', layer='Linear', gain=1.0))
        self.generator = nn.Sequential(nn.Linear(LATENT, 32), nn.Tanh(), nn.Linear(32, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.frozen = nn.Linear(64, 64)
        set_requires_grad(self.frozen, False)

    def forward(self, inputs, latent, mode='tensor'):
        return self.generator(latent)

    def _score_loss(self, images, real):
        scores = self.discriminator(images)
        target = torch.full_like(scores, float(real))
        return binary_cross_entropy_with_logits(scores, target)

    def train_step(self, data, optim_wrapper):
        data = self.data_preprocessor(data, training=True)
        images, latent = data['inputs'].flatten(1), data['latent']

        set_requires_grad(self.discriminator, True)
        wrapper = optim_wrapper['discriminator']
        with wrapper.optim_context(self.discriminator):
            with torch.no_grad():
                fakes = self.generator(latent)
            losses = dict(
                loss_real=self._score_loss(images, True), loss_fake=self._score_loss(fakes, False)
            )
            loss, log_vars = self.parse_losses(losses)
        wrapper.update_params(loss)

        set_requires_grad(self.discriminator, False)
        wrapper = optim_wrapper['generator']
        with wrapper.optim_context(self.generator):
            fakes = self.generator(latent)
            # A mean times 0.1 has a gradient in float64 on PyTorch's lazy device.
            near = (0.1 * (self.frozen(fakes) - self.frozen(images)).square()).mean()
            losses = dict(loss_g=self._score_loss(fakes, True), loss_near=near)
            loss, more = self.parse_losses(losses)
        wrapper.update_params(loss)
        return {**log_vars, **{f'g_{name}': value for name, value in more.items()}}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class EachChild:
    """An optimizer wrapper for each child that ``optim_wrapper`` names."""

    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.cfgs = optim_wrapper_cfg

    def __call__(self, model):
        model = getattr(model, 'module', model)
        return OptimWrapperDict(
            **{
                name: build_optim_wrapper(getattr(model, name), cfg)
                for name, cfg in self.cfgs.items()
                if isinstance(cfg, dict)
            }
        )


@METRICS.register_module()
class OrderedScores(BaseMetric):
    """Figures that change if a sample is lost, moved or computed otherwise."""

    def process(self, data_batch, data_samples):
        # Tensors of the device, as most metrics of OpenMMLab's keep them.
        self.results.extend(data_samples)

    def compute_metrics(self, results):
        scores = torch.stack([result['scores'] for result in results]).double()
        labels = torch.stack([result['label'] for result in results])
        places = torch.arange(len(results), dtype=torch.float64)
        return dict(
            samples=float(len(results)),
            ordered=float((places * scores.mean(dim=1)).mean()),
            labels=float((places * labels).mean()),
            loss=float(cross_entropy(scores, labels)),
        )


@HOOKS.register_module()
class KeepMetrics(Hook):
    """Remembers what every validation told."""

    def __init__(self):
        self.found = []

    def after_val_epoch(self, runner, metrics=None):
        self.found.append(dict(metrics))
