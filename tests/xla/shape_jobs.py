"""Trainings with images of many sizes, and what they compile."""

import logging
import os

import torch
from mmengine.config import Config, ConfigDict
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, DefaultScope
from torch import nn
from torch.utils.data import Dataset

from tests import parallel_jobs
from tests.jobs import messages_of, note
from tests.xla.executions import Counts, counts

SIZES = [(10 + number * 3 % 11, 12 + number * 5 % 13) for number in range(143)]


@DATASETS.register_module(force=True)
class Pictures(Dataset):
    """Random images; ``sizes`` are taken in turn, ``lengths`` are those of another tensor.

    With ``flips`` an item is two views of an image, the second flipped.
    """

    metainfo = dict(classes=('a', 'b', 'c'))

    def __init__(self, count, sizes, lengths=(1,), maps=False, flips=False):
        self.count, self.sizes, self.lengths, self.maps = count, sizes, lengths, maps
        self.flips = flips

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
        sample.set_metainfo(dict(img_shape=size, ori_shape=size, img_path=str(index)))
        if not self.flips:
            return dict(inputs=image, data_samples=sample)
        flipped = sample.clone()
        flipped.set_metainfo(dict(flip=True, flip_direction='horizontal'))
        return dict(inputs=[image, image.flip(-1)], data_samples=[sample, flipped])


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


def segmentor():
    """That of :mod:`tests.parallel_jobs`, as small as it can be, with dropout."""
    made = ConfigDict(parallel_jobs.segmentor(), auxiliary_head=None)
    made.data_preprocessor.update(mean=[120.0] * 3, std=[60.0] * 3, size=(8, 8))
    made.backbone.update(base_channels=4, num_stages=1, strides=(1,), dilations=(1,))
    made.backbone.out_indices = (0,)
    made.decode_head.update(in_channels=4, in_index=0, channels=4, num_classes=3)
    made.decode_head.update(num_convs=0, dropout_ratio=0.1)
    return made


class Predictions(Hook):
    """What each image was predicted, where, and how many graphs there were then."""

    def __init__(self, graphs):
        self.graphs = graphs
        self.counts, self.predictions, self.devices = [], [], set()

    def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for sample in outputs:
            found = sample.pred_sem_seg.data
            self.devices.add(str(found.device))
            self.predictions.append(found.cpu().numpy())
        self.counts.append(self.graphs())


def graphs():
    """How many torch_xla has compiled so far."""
    return counts()[1]


def validate(kind, work_dir, model, sizes, views=False, graphs=graphs, **accelerator):
    """Test a segmentor on an image of each size, one at a time, or two views of it.

    Returns:
        dict: ``predictions``, ``devices`` where they were, ``counts`` of graphs, ``metrics``.
    """
    from mmdevplug.runner import DeviceRunner

    dataset = dict(type='mmengine.Pictures', count=len(sizes), sizes=sizes, maps=True)
    if views:
        dataset.update(flips=True)
        model = dict(type='SegTTAModel', module=model)
    loader = dict(
        dataset=dataset,
        batch_size=1,
        sampler=dict(type='DefaultSampler', shuffle=False),
        num_workers=0,
        collate_fn=dict(type='pseudo_collate'),
    )
    cfg = dict(
        default_scope='mmseg',
        model=model,
        accelerator=dict(type=kind, **accelerator),
        test_dataloader=loader,
        test_cfg=dict(),
        test_evaluator=dict(type='IoUMetric', iou_metrics=['mIoU']),
        default_hooks=dict(checkpoint=None),
        randomness=dict(seed=0),
        work_dir=str(work_dir),
    )
    runner = DeviceRunner.from_cfg(Config(cfg))
    seen = Predictions(graphs)
    runner.register_hook(seen)
    metrics = runner.test()
    del seen.graphs
    return dict(vars(seen), metrics=metrics)


def detect(kind, head, sizes, pad_to):
    """Let a detector with random weights find boxes in random images, one at a time.

    Returns:
        dict: ``predictions`` (boxes and labels of each), ``counts`` of graphs, ``executions``.
    """
    from mmdet.structures import DetDataSample
    from mmdet.utils import register_all_modules

    from mmdevplug import init_device
    from mmdevplug.config.pad_to import read_pad_to
    from mmdevplug.data.padding import install_padding
    from mmdevplug.model.place_model import place_model

    register_all_modules(init_default_scope=False)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(detector(head))
    if pad_to is not None:
        install_padding(model, read_pad_to(pad_to))
    model = place_model(model, init_device('none', kind)).eval()
    found, counted = [], []
    for number, size in enumerate(sizes):
        random = torch.Generator().manual_seed(number)
        image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=random)
        sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1, 1)))
        with torch.no_grad():
            (result,) = model.test_step(dict(inputs=[image], data_samples=[sample]))
        boxes = result.pred_instances
        found.append((boxes.bboxes.cpu().numpy(), boxes.labels.cpu().numpy()))
        counted.append(counts())
    executions, compilations = zip(*counted)
    return dict(predictions=found, counts=list(compilations), executions=list(executions))


def detector(head):
    """A small detector of one stage."""
    anchors = dict(
        type='AnchorGenerator',
        octave_base_scale=2,
        scales_per_octave=1,
        ratios=[1.0],
        strides=[4, 8],
    )
    sizes = dict(num_classes=3, in_channels=4, stacked_convs=1, feat_channels=4, strides=[4, 8])
    with_anchors = dict(sizes, anchor_generator=anchors)
    del with_anchors['strides']
    boxes = dict(type='DeltaXYWHBBoxCoder')
    focal = dict(type='FocalLoss', use_sigmoid=True)
    heads = dict(
        RetinaHead=dict(with_anchors, bbox_coder=boxes, loss_cls=focal),
        FCOSHead=dict(
            sizes, regress_ranges=((-1, 8), (8, 1e8)), norm_cfg=dict(type='GN', num_groups=2)
        ),
        GFLHead=dict(
            with_anchors,
            loss_cls=dict(type='QualityFocalLoss', use_sigmoid=True),
            norm_cfg=dict(type='GN', num_groups=2),
            reg_max=4,
        ),
        YOLOXHead=dict(sizes),
    )
    return dict(
        type='SingleStageDetector',
        data_preprocessor=dict(
            type='DetDataPreprocessor', mean=[120.0] * 3, std=[60.0] * 3, pad_size_divisor=8
        ),
        backbone=dict(
            type='ResNet',
            depth=18,
            base_channels=4,
            num_stages=2,
            strides=(1, 2),
            dilations=(1, 1),
            out_indices=(0, 1),
        ),
        neck=dict(type='FPN', in_channels=[4, 8], out_channels=4, num_outs=2),
        bbox_head=dict(heads[head], type=head),
        test_cfg=ConfigDict(
            nms_pre=100,
            min_bbox_size=0,
            score_thr=0.0,
            nms=ConfigDict(type='nms', iou_threshold=0.5),
            max_per_img=20,
        ),
    )


def train(work_dir, kind='xla', count=24, model=None, scope='mmengine', dataset=(), **accelerator):
    """Train an epoch with batches of two.

    Returns:
        dict: ``counts`` and ``losses`` of each iteration, ``warnings``, and ``logged``: the
        scalar ``device/compiles``.
    """
    from mmdevplug.hooks import compilation_hook
    from mmdevplug.runner import DeviceRunner

    compilation_hook.WARM_UP = 4
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
    seen = Counts()
    runner.register_hook(seen)
    # After it, as reading a loss may execute a graph.
    losses = note(runner, 'after_train_iter', lambda *_, outputs, **__: float(outputs['loss']))
    with messages_of(runner.logger, logging.WARNING) as told:
        runner.train()
    executions, compilations = zip(*seen.counted)
    logged = runner.message_hub.log_scalars.get('train/device/compiles')
    return dict(
        counts=list(compilations),
        executions=list(executions),
        losses=losses,
        warnings=[line for line in told if 'warm-up' in line],
        logged=None if logged is None else logged.current(),
    )
