"""Batches padded to few sizes, by the data preprocessors of OpenMMLab's packages."""

import copy

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.registry import RUNNERS
from mmengine.structures import InstanceData, PixelData
from torch import nn

from mmdevplug.config.pad_to import read_pad_to
from mmdevplug.data.padding import install_padding
from mmdevplug.errors import DevPlugError, ModelError
from mmdevplug.patches.mmengine import restore_mmengine
from mmdevplug.patches.mmseg import patch_accuracy
from tests import parallel_jobs
from tests.jobs import digits_config
from tests.ranks import in_ranks

MEAN, STD = [100.0, 110.0, 120.0], [50.0, 60.0, 70.0]


# the option ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('pad_to', 'sizes', 'expected'),
    [
        (64, [(1, 64), (65, 3)], (128, 64)),
        ((512, 1024), [(500, 600)], (512, 1024)),
        ([32, 48], [(32, 48)], (32, 48)),
        ([(64, 64), (32, 64), (32, 32)], [(20, 20)], (32, 32)),
        ([(64, 64), (32, 64), (32, 32)], [(20, 20), (20, 40)], (32, 64)),
        ([(64, 64), (32, 64), (32, 32)], [(40, 20), (20, 40)], (64, 64)),
        ([(16, 96), (32, 32)], [(10, 10)], (32, 32)),
    ],
)
def test_the_smallest_size_that_holds_the_batch(pad_to, sizes, expected):
    assert read_pad_to(pad_to).size_for(sizes) == expected


def test_no_padding():
    assert read_pad_to(None) is None
    assert read_pad_to(False) is None


@pytest.mark.parametrize('pad_to', [0, -4, True, 1.5, '64', (1, 2, 3), [(4, 4), 5], [], (0, 4)])
def test_other_forms_are_refused_with_those_there_are(pad_to):
    with pytest.raises(DevPlugError) as raised:
        read_pad_to(pad_to)
    assert f'accelerator.pad_to={pad_to!r}' in str(raised.value)
    assert '[(512, 512), (512, 1024)]' in str(raised.value)


def test_an_image_larger_than_every_bucket_names_it_and_what_to_write():
    with pytest.raises(DevPlugError) as raised:
        read_pad_to([(32, 32), (32, 64)]).size_for([(30, 30), (40, 70)])
    message = str(raised.value)
    assert 'pad_to=[(32, 32), (32, 64)]' in message
    assert '(30, 30), (40, 70)' in message
    written = message.split('Write pad_to=')[1].split(', or resize')[0]
    assert read_pad_to(eval(written)).size_for([(40, 70)]) == (64, 96)


# preprocessors -------------------------------------------------------------------------------


def padded(preprocessor, pad_to):
    holder = nn.Module()
    holder.data_preprocessor = preprocessor
    install_padding(holder, read_pad_to(pad_to))
    return preprocessor


def images(*sizes):
    random = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=random) for size in sizes
    ]


@pytest.mark.parametrize(
    ('options', 'batch', 'pad_to', 'shape'),
    [
        (dict(mean=MEAN, std=STD), images((10, 12), (14, 9)), (16, 24), (2, 3, 16, 24)),
        ({}, torch.stack(images((10, 12), (10, 12))), 8, (2, 3, 16, 16)),
        (dict(pad_size_divisor=32), images((8, 8)), (10, 40), (1, 3, 32, 64)),
    ],
    ids=['images', 'stacked', 'divisor'],
)
def test_mmengine_pads_with_its_own_value(options, batch, pad_to, shape):
    options.update(pad_value=7.0, bgr_to_rgb=True)
    plain = ImgDataPreprocessor(**options)(dict(inputs=batch))['inputs']
    larger = padded(ImgDataPreprocessor(**options), pad_to)(dict(inputs=batch))['inputs']
    height, width = plain.shape[2:]
    assert larger.shape == shape
    assert torch.equal(larger[..., :height, :width], plain)
    assert (larger[..., height:, :] == 7.0).all()
    assert (larger[..., width:] == 7.0).all()


def test_a_preprocessor_that_only_moves():
    moved = padded(BaseDataPreprocessor(), 8)(dict(inputs=images((3, 5), (9, 2))))['inputs']
    assert [tuple(image.shape) for image in moved] == [(3, 16, 8)] * 2


@pytest.mark.parametrize('data', [dict(inputs=dict(text='a')), [torch.ones(1)], dict(inputs=[])])
def test_what_has_no_images_is_refused(data):
    with pytest.raises(DevPlugError, match="images in 'inputs'"):
        padded(ImgDataPreprocessor(), 8)(data)


def test_a_copied_model_pads_by_itself():
    original = padded(ImgDataPreprocessor(pad_value=1), 8)
    other = copy.deepcopy(original)
    other.pad_value = 2
    assert (other(dict(inputs=images((4, 4))))['inputs'][..., 4:] == 2).all()
    assert (original(dict(inputs=images((4, 4))))['inputs'][..., 4:] == 1).all()


def test_a_model_without_preprocessor_is_refused():
    with pytest.raises(ModelError, match='Linear has no data preprocessor'):
        install_padding(nn.Linear(2, 2), read_pad_to(8))


@in_ranks(2, together=True)
def test_too_large_an_image_ends_all_ranks_with_one_message(tmp_path):
    cfg = digits_config('cpu', tmp_path, train_cfg__max_epochs=1, train_cfg__val_interval=9)
    cfg.model.data_preprocessor = dict(type='ImgDataPreprocessor')
    cfg.accelerator.pad_to = (4, 4)
    with pytest.raises(DevPlugError, match=r'it needs at least \(8, 8\)'):
        RUNNERS.build(cfg).train()


# mmdet ---------------------------------------------------------------------------------------


def detection_sample(size, box):
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    masks = np.ones((1, *size), dtype=np.uint8)
    sample = DetDataSample(
        gt_instances=InstanceData(
            bboxes=torch.tensor([box]), labels=torch.tensor([0]), masks=BitmapMasks(masks, *size)
        ),
        gt_sem_seg=PixelData(sem_seg=torch.ones(1, *size, dtype=torch.int64)),
    )
    sample.set_metainfo(dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0)))
    return sample


def detection_batch(*sizes):
    samples = [detection_sample(size, [4.0, 4.0, 20.0, 20.0]) for size in sizes]
    return dict(inputs=images(*sizes), data_samples=samples)


def det_preprocessor(**options):
    from mmdet.models import DetDataPreprocessor

    return DetDataPreprocessor(
        mean=MEAN, std=STD, pad_size_divisor=8, pad_mask=True, pad_seg=True, **options
    )


@pytest.mark.operators
def test_mmdet_sees_a_batch_with_a_larger_image_in_it():
    wanted = det_preprocessor()(detection_batch((30, 35), (64, 96)), True)
    batch = detection_batch((30, 35))
    found = padded(det_preprocessor(), [(32, 32), (64, 96)])(batch, True)
    assert torch.equal(found['inputs'][0], wanted['inputs'][0])
    (one,), other = found['data_samples'], wanted['data_samples'][0]
    assert one.metainfo == other.metainfo
    assert one.img_shape == (30, 35)
    assert one.pad_shape == (32, 40)
    assert one.batch_input_shape == (64, 96)
    assert (one.gt_instances.masks.masks == other.gt_instances.masks.masks).all()
    assert torch.equal(one.gt_sem_seg.sem_seg, other.gt_sem_seg.sem_seg)
    assert batch['data_samples'][0].gt_sem_seg.shape == (30, 35)  # the data set's own


@pytest.mark.operators
def test_augmentations_of_a_batch_come_after_the_pad_value():
    seen = []

    class Look(nn.Module):
        def forward(self, inputs, data_samples):
            seen.append(inputs.clone())
            return inputs + 1, data_samples

    preprocessor = det_preprocessor(pad_value=9)
    preprocessor.batch_augments = nn.ModuleList([Look()])
    found = padded(preprocessor, 48)(detection_batch((30, 35)), True)
    assert (seen[0][..., 30:, :] == 9).all()
    assert torch.equal(found['inputs'], seen[0] + 1)


@pytest.mark.operators
def test_a_preprocessor_that_hands_on_to_another_pads_once():
    from mmdet.models import MultiBranchDataPreprocessor
    from mmdet.utils import register_all_modules

    register_all_modules(init_default_scope=False)
    config = dict(type='mmdet.DetDataPreprocessor', mean=MEAN, std=STD)
    outer = padded(MultiBranchDataPreprocessor(config), (64, 96))
    batch = detection_batch((30, 35), (20, 20))
    # As `pseudo_collate` makes them: for each branch a list.
    branches = {key: dict(sup=part[:1], unsup=part[1:]) for key, part in batch.items()}
    found = outer(branches, True)['inputs']
    assert found['sup'].shape == found['unsup'].shape == (1, 3, 64, 96)
    assert {*found} == {'sup', 'unsup'}


class Patches(nn.Module):
    """Features of patches, which are 0 where the image is."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 8, stride=8, bias=False)

    def forward(self, inputs):
        return (self.conv(inputs).relu(),)


@pytest.mark.operators
def test_losses_and_predictions_of_a_detector_are_those_without_padding():
    from mmdet.registry import MODELS as DET_MODELS
    from mmdet.utils import register_all_modules

    register_all_modules(init_default_scope=False)
    DET_MODELS.register_module(module=Patches, force=True)
    anchors = dict(type='AnchorGenerator', scales=[2], ratios=[1.0], strides=[8])
    assigner = dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0)
    config = ConfigDict(
        type='mmdet.SingleStageDetector',
        data_preprocessor=dict(type='mmdet.DetDataPreprocessor', mean=MEAN, std=STD),
        backbone=dict(type='mmdet.Patches'),
        bbox_head=dict(
            type='mmdet.RetinaHead',
            num_classes=2,
            in_channels=8,
            stacked_convs=0,
            feat_channels=8,
            anchor_generator=anchors,
        ),
        train_cfg=dict(assigner=assigner, allowed_border=-1, pos_weight=-1, debug=False),
        test_cfg=dict(
            nms_pre=50,
            min_bbox_size=0,
            score_thr=0.0,
            nms=dict(type='nms', iou_threshold=0.6),
            max_per_img=10,
        ),
    )
    torch.manual_seed(0)
    plain = DET_MODELS.build(copy.deepcopy(config))
    larger = copy.deepcopy(plain)
    install_padding(larger, read_pad_to((64, 96)))
    results = []
    for model in (plain, larger):
        data = model.data_preprocessor(detection_batch((32, 40), (32, 40)), True)
        losses = model.parse_losses(model(**data, mode='loss'))[1]
        model.eval()
        with torch.no_grad():
            found = model.test_step(detection_batch((32, 40)))[0].pred_instances
        results.append((data['inputs'].shape, losses, found))
    (shape, losses, found), (larger_shape, larger_losses, larger_found) = results
    assert (shape[2:], larger_shape[2:]) == ((32, 40), (64, 96))
    assert losses['loss'] > 0.1
    for name, value in losses.items():
        torch.testing.assert_close(larger_losses[name], value, rtol=1e-6, atol=1e-6)
    best, larger_best = found.scores[:5], larger_found.scores[:5]
    assert len(best) == 5
    assert (larger_found.bboxes[:, 0::2] <= 40).all()
    assert (larger_found.bboxes[:, 1::2] <= 32).all()
    assert (larger_best >= best - 1e-6).all()


# mmseg ---------------------------------------------------------------------------------------


def segmentation_batch(*sizes):
    from mmseg.structures import SegDataSample

    random = torch.Generator().manual_seed(1)
    samples = []
    for size in sizes:
        labels = torch.randint(0, 4, (1, *size), generator=random)
        labels[:, 0, :3] = 255
        sample = SegDataSample(gt_sem_seg=PixelData(data=labels))
        sample.set_metainfo(dict(img_shape=size, ori_shape=size))
        samples.append(sample)
    return dict(inputs=images(*sizes), data_samples=samples)


def segmentor(pad_to, **preprocessor):
    """One convolution, then single pixels: nothing looks over the edge of an image twice."""
    from mmseg.registry import MODELS as SEG_MODELS
    from mmseg.utils import register_all_modules

    register_all_modules(init_default_scope=False)

    @SEG_MODELS.register_module(force=True)
    class Edges(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3, padding=1)

        def forward(self, inputs):
            return (self.conv(inputs).relu(),)

    torch.manual_seed(0)
    preprocessor.update(type='mmseg.SegDataPreProcessor', mean=MEAN, std=STD)
    cfg = ConfigDict(parallel_jobs.segmentor(), data_preprocessor=preprocessor)
    cfg.backbone, cfg.auxiliary_head = dict(type='mmseg.Edges'), None
    cfg.decode_head.update(type='mmseg.FCNHead', in_channels=6, in_index=0, channels=6)
    cfg.decode_head.num_convs = 0
    cfg.decode_head.loss_decode.avg_non_ignore = True
    model = SEG_MODELS.build(cfg)
    if pad_to is not None:
        install_padding(model, read_pad_to(pad_to))
    return model


def segmentation_losses(model, *sizes):
    data = model.data_preprocessor(segmentation_batch(*sizes), True)
    return model.parse_losses(model(**data, mode='loss'))


@pytest.mark.operators
def test_mmseg_pads_maps_with_its_own_value():
    model = segmentor((32, 48), size=(8, 8), seg_pad_val=254, pad_val=2)
    batch = segmentation_batch((20, 30), (24, 28))
    data = model.data_preprocessor(batch, True)
    assert data['inputs'].shape == (2, 3, 32, 48)
    assert (data['inputs'][0, :, 20:] == 2).all()
    first = data['data_samples'][0]
    assert (first.gt_sem_seg.data[:, 20:] == 254).all()
    assert torch.equal(
        first.gt_sem_seg.data[:, :20, :30], batch['data_samples'][0].gt_sem_seg.data
    )
    assert first.padding_size == (0, 18, 0, 12)
    assert (first.img_shape, first.pad_shape) == ((20, 30), (32, 48))


@pytest.mark.operators
def test_losses_and_gradients_of_a_segmentor_are_those_without_padding():
    results = []
    for pad_to in (None, (32, 48)):
        model = segmentor(pad_to, size=(20, 30))
        total, found = segmentation_losses(model, (20, 30), (20, 30))
        total.backward()
        found.update((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        results.append(found)
    plain, larger = results
    assert 'backbone.conv.weight' in plain
    assert plain['loss'] > 0.1
    for name, value in plain.items():
        torch.testing.assert_close(larger[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.operators
@pytest.mark.parametrize('test_cfg', [None, dict(size_divisor=16)])
def test_predictions_of_a_segmentor_have_the_size_of_the_image(test_cfg):
    results = []
    for pad_to in (None, (32, 48)):
        model = segmentor(pad_to, size=(20, 30), test_cfg=test_cfg).eval()
        with torch.no_grad():
            results.append(model.test_step(segmentation_batch((20, 30)))[0])
    assert results[0].pred_sem_seg.shape == results[1].pred_sem_seg.shape == (20, 30)
    torch.testing.assert_close(
        results[1].seg_logits.data, results[0].seg_logits.data, rtol=1e-5, atol=1e-5
    )


@pytest.mark.operators
def test_counting_with_masks_is_mmsegs_accuracy(monkeypatch):
    from mmseg.models.decode_heads import decode_head
    from mmseg.models.losses import accuracy

    monkeypatch.setattr(decode_head, 'accuracy', accuracy)
    assert patch_accuracy(segmentor(None, size=(8, 8))) == 1
    ours = decode_head.accuracy
    assert ours is not accuracy
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 6, 7, generator=random)
    labels = torch.randint(0, 5, (2, 6, 7), generator=random)
    labels[:, :2] = 255
    ignored = torch.full_like(labels, 255)
    for topk in (1, (1, 3)):
        for target, ignore_index in ((labels, None), (labels, 255), (ignored, 255)):
            wanted = accuracy(scores, target, topk, ignore_index=ignore_index)
            found = ours(scores, target, topk, ignore_index=ignore_index)
            torch.testing.assert_close(found, wanted)
    restore_mmengine()
    assert decode_head.accuracy is accuracy


@pytest.mark.operators
def test_pixels_of_another_size_than_the_image_are_refused():
    batch = segmentation_batch((20, 30))
    batch['inputs'] = images((10, 15))
    with pytest.raises(DevPlugError, match=r'gt_sem_seg.*\(20, 30\), expected \(10, 15\)'):
        segmentor(32, size=(20, 30)).data_preprocessor(batch, True)


@pytest.mark.operators
@pytest.mark.xla  # for mmpretrain, which is installed beside torch_xla
@pytest.mark.parametrize('augmented', [False, True])
def test_mmpretrain_pads_before_it_mixes(augmented):
    pytest.importorskip('mmpretrain', reason='needs mmpretrain')
    from mmpretrain.models import ClsDataPreprocessor
    from mmpretrain.structures import DataSample

    mixing = dict(augments=[dict(type='mmpretrain.Mixup', alpha=1.0)], probs=[1.0])
    options = dict(mean=MEAN, std=STD, to_rgb=True, pad_value=4.0, num_classes=3)
    preprocessor = padded(
        ClsDataPreprocessor(batch_augments=mixing if augmented else None, **options), (16, 24)
    )
    samples = [DataSample().set_gt_label(label) for label in (0, 2)]
    found = preprocessor(dict(inputs=images((10, 12), (10, 12)), data_samples=samples), True)
    assert found['inputs'].shape == (2, 3, 16, 24)
    outside = found['inputs'][..., 10:, :]
    torch.testing.assert_close(outside, torch.full_like(outside, 4.0))
    assert hasattr(found['data_samples'][0], 'gt_score') is augmented
    plain = ClsDataPreprocessor(**options)(dict(inputs=images((10, 12), (10, 12))))['inputs']
    if not augmented:
        assert torch.equal(found['inputs'][..., :10, :12], plain)
