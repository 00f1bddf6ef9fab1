"""Trainings with images of many sizes, and what they compile."""

import logging
import os

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from torch import nn
from torch.utils.data import Dataset

SIZES = [(10 + number * 3 % 11, 12 + number * 5 % 13) for number in range(143)]


@DATASETS.register_module(force=True)
class Pictures(Dataset):
    """Random images; ``sizes`` are taken in turn, ``lengths`` are those of another tensor."""

    metainfo = dict(classes=('a', 'b', 'c'))

    def __init__(self, count, sizes, lengths=(1,), maps=False):
        self.count, self.sizes, self.lengths, self.maps = count, sizes, lengths, maps

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        size = self.sizes[index % len(self.sizes)]
        image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=random)
        if not self.maps:
            words = torch.ones(self.lengths[index % len(self.lengths)])
            return dict(inputs=image, words=words)
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        labels = torch.randint(0, 3, (1, *size), generator=random)
        labels[0, : index % 4] = 255
        sample = SegDataSample(gt_sem_seg=PixelData(data=labels))
        sample.set_metainfo(dict(img_shape=size, ori_shape=size))
        return dict(inputs=image, data_samples=sample)


@MODELS.register_module(force=True)
class OneConvolution(BaseModel):
    """A convolution.

    Args:
        counts (bool): Whether a Python number that grows takes part in the shape of a graph.
    """

    def __init__(self, counts=False, **kwargs):
        super().__init__(**kwargs)
        self.conv = nn.Conv2d(3, 2, 3)
        self.calls = 0 if counts else None

    def forward(self, inputs, words=None, data_samples=None, mode='loss'):
        loss = self.conv(inputs).abs().mean()
        for one in words or ():
            loss = loss + 0 * one.sum()
        if self.calls is not None:
            self.calls += 1
            loss = loss + 0 * torch.ones(self.calls, device=loss.device).sum()
        return dict(loss=loss)


class Compilations(Hook):
    """The number of compiled graphs after each iteration, and what was warned of."""

    priority = 'LOWEST'

    def __init__(self):
        self.counts, self.executions, self.warnings, self.losses = [], [], [], []

    def before_train(self, runner):
        keep = logging.Handler(logging.WARNING)
        keep.emit = lambda record: self.warnings.append(record.getMessage())
        runner.logger.addHandler(keep)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics

        xm.wait_device_ops()
        self.counts.append((metrics.metric_data('CompileTime') or [0])[0])
        self.executions.append((metrics.metric_data('ExecuteTime') or [0])[0])
        self.losses.append(float(outputs['loss']))


def segmentor():
    norm = dict(type='BN', requires_grad=True)
    return dict(
        type='EncoderDecoder',
        data_preprocessor=dict(
            type='SegDataPreProcessor', mean=[120.0] * 3, std=[60.0] * 3, size=(8, 8)
        ),
        backbone=dict(
            type='ResNetV1c',
            depth=18,
            base_channels=4,
            num_stages=1,
            strides=(1,),
            dilations=(1,),
            out_indices=(0,),
            norm_cfg=norm,
            norm_eval=False,
            style='pytorch',
        ),
        decode_head=dict(
            type='FCNHead',
            in_channels=4,
            in_index=0,
            channels=4,
            num_convs=0,
            concat_input=False,
            num_classes=3,
            loss_decode=dict(type='CrossEntropyLoss'),
        ),
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )


def train(work_dir, kind='xla', count=24, model=None, scope='mmengine', dataset=(), **accelerator):
    """Train an epoch with batches of two.

    Returns:
        dict: ``counts`` and ``losses`` of each iteration, ``warnings``, and ``logged``: the
        scalar ``device/compiles``.
    """
    from mmdevplug.runner import DeviceRunner

    accelerator.setdefault('compilations', dict(warmup=4))
    plain = dict(type='ImgDataPreprocessor', mean=[120.0] * 3, std=[60.0] * 3)
    cfg = dict(
        default_scope=scope,
        model=model or dict(type='OneConvolution', data_preprocessor=plain),
        accelerator=dict(type=kind, **accelerator),
        train_dataloader=dict(
            dataset=dict(
                dict(type='mmengine.Pictures', count=count, sizes=SIZES), **dict(dataset)
            ),
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=False),
            num_workers=0,
            collate_fn=dict(type='pseudo_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.0)),
        default_hooks=dict(logger=dict(type='LoggerHook', interval=100), checkpoint=None),
        randomness=dict(seed=0),
        work_dir=str(work_dir),
        launcher='pytorch' if 'RANK' in os.environ else 'none',
    )
    runner = DeviceRunner.from_cfg(Config(cfg))
    seen = Compilations()
    runner.register_hook(seen)
    runner.train()
    logged = runner.message_hub.log_scalars.get('train/device/compiles')
    return dict(
        counts=seen.counts,
        executions=seen.executions,
        losses=seen.losses,
        warnings=[w for w in seen.warnings if 'warm-up' in w],
        logged=None if logged is None else logged.current(),
    )
