"""Train small detectors for some iterations, and count what they compile and execute."""

import copy
import time

import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, DefaultScope

from tests.xla.executions import counts as xla_counts
from tests.xla.shape_jobs import detector

SIZE, BATCH = 64, 2
#: Of semantic segmentation.
CLASSES = 5
CONFIGS = dict(
    boxes='faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    masks='mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
    cascade='cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py',
    semantic='htc/htc_r50_fpn_1x_coco.py',
    scoring='ms_rcnn/ms-rcnn_r50_fpn_1x_coco.py',
    panoptic='panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py',
    proposals='cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco.py',
    sparse='sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py',
    instances='condinst/condinst_r50_fpn_ms-poly-90k_coco_instance.py',
)


def configured(name, **head):
    """A detector of mmdet's configs on a small ResNet-18, if it has a ResNet."""
    from pathlib import Path

    import mmdet

    path = Path(mmdet.__file__).parent / '.mim' / 'configs' / name
    model = Config.fromfile(path).model
    model.backbone.init_cfg = None
    model.pop('init_cfg', None)
    model.data_preprocessor.pop('batch_augments', None)
    if model.backbone.get('depth') == 50:
        model.backbone.update(depth=18, base_channels=16)
        channels = [16, 32, 64, 128]
        model.neck.in_channels = channels[-len(model.neck.in_channels) :]
    if head:
        model.bbox_head.update(head)
    return model


def trained_detector(head):
    """A small detector of one stage that learns, see :func:`tests.xla.shape_jobs.detector`."""
    made = detector(head)
    if head == 'GFLHead':
        made['bbox_head'].update(loss_bbox=dict(type='GIoULoss'))
    assigner = dict(type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0)
    assigners = dict(
        GFLHead=dict(type='ATSSAssigner', topk=4), YOLOXHead=dict(type='SimOTAAssigner')
    )
    if head != 'FCOSHead':
        made['train_cfg'] = ConfigDict(
            assigner=assigners.get(head, assigner),
            sampler=dict(type='PseudoSampler'),
            allowed_border=-1,
            pos_weight=-1,
        )
    return made


def two_stage_detector(name='boxes'):
    """A small detector of two stages, or of one with masks, from mmdet's :data:`CONFIGS`."""
    made = configured(CONFIGS[name])
    if name == 'instances':
        return _instances(made)
    rois = made.roi_head
    made.neck.update(in_channels=[16, 32, 64, 128], out_channels=16)
    rois.bbox_roi_extractor.out_channels = 16
    made.test_cfg.rcnn.update(score_thr=0.0, max_per_img=20)
    if name == 'sparse':
        return _sparse(made)
    for stage in made.rpn_head.get('stages', [made.rpn_head]):
        stage.update(in_channels=16, feat_channels=16)
        if 'anchor_generator' in stage:
            stage.anchor_generator.scales = [2]
    for head in _listed(rois.bbox_head):
        head.update(in_channels=16, num_classes=3, fc_out_channels=32)
    small = dict(in_channels=16, conv_out_channels=16, num_convs=1, num_classes=3)
    for head in _listed(rois.get('mask_head', [])):
        head.update(small)
    for part in ('mask_roi_extractor', 'semantic_roi_extractor'):
        if part in rois:
            rois[part].out_channels = 16
    if name == 'semantic':
        rois.semantic_head.update(small, num_classes=CLASSES)
    if name == 'panoptic':
        classes = dict(num_things_classes=3, num_stuff_classes=CLASSES - 3)
        made.semantic_head.update(classes, in_channels=16, inner_channels=16)
        made.semantic_head.norm_cfg.num_groups = 4
        made.panoptic_fusion_head.update(classes)
    if name == 'proposals':
        made.data_preprocessor.std = [58.0, 58.0, 58.0]
    if name == 'scoring':
        rois.mask_iou_head.update(small, num_fcs=1, fc_out_channels=32)
    _listed(made.train_cfg.rpn)[-1].sampler.num = 32
    made.train_cfg.rpn_proposal.update(nms_pre=100, max_per_img=60)
    for stage in _listed(made.train_cfg.rcnn):
        stage.sampler.num = 32
    made.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
    return made


def _listed(value):
    return value if isinstance(value, list) else [value]


def _instances(made):
    """Cut CondInst down."""
    made.neck.out_channels = 32
    made.bbox_head.update(num_classes=3, in_channels=32, feat_channels=32, stacked_convs=1)
    made.mask_head.mask_feature_head.update(in_channels=32, feat_channels=32, num_stacked_convs=1)
    made.test_cfg.update(score_thr=0.0, max_per_img=20)
    return made


def _sparse(made):
    """Cut Sparse R-CNN down to two stages, without dropout."""
    rois = made.roi_head
    made.rpn_head.update(num_proposals=20, proposal_feature_channel=16)
    rois.update(num_stages=2, stage_loss_weights=[1, 1], proposal_feature_channel=16)
    rois.bbox_head, made.train_cfg.rcnn = rois.bbox_head[:2], made.train_cfg.rcnn[:2]
    for head in rois.bbox_head:
        head.update(num_classes=3, num_heads=4, feedforward_channels=32, in_channels=16)
        head.dynamic_conv_cfg.update(in_channels=16, feat_channels=8, out_channels=16)
    return made


def denoising_detector():
    """A small DINO, without dropout."""
    made = configured('dino/dino-4scale_r50_8xb2-12e_coco.py', num_classes=3)
    made.num_queries = 20
    made.encoder.num_layers = made.decoder.num_layers = 1
    for part in (made.encoder, made.decoder):
        part.layer_cfg.ffn_cfg.update(feedforward_channels=32, ffn_drop=0.0)
        for name in ('self_attn_cfg', 'cross_attn_cfg'):
            if name in part.layer_cfg:
                part.layer_cfg[name].dropout = 0.0
    made.dn_cfg.group_cfg.num_dn_queries = 10
    return made


def batch(number, boxes=None, classes=3, masks=False):
    """Two pictures with random boxes: of varying number, or as many as ``boxes`` says.

    With ``masks`` the boxes have some, and pixels have classes.
    """
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData, PixelData

    random = torch.Generator().manual_seed(number)
    inputs, samples = [], []
    for place in range(BATCH):
        inputs.append(torch.randint(0, 256, (3, SIZE, SIZE), dtype=torch.uint8, generator=random))
        count = 1 + (number * 3 + place) % 5 if boxes is None else boxes[place]
        corner = torch.rand(count, 2, generator=random) * 30
        sides = torch.rand(count, 2, generator=random) * 25 + 8
        size = (SIZE, SIZE)
        sample = DetDataSample(
            metainfo=dict(
                img_shape=size, ori_shape=size, batch_input_shape=size, scale_factor=(1.0, 1.0)
            )
        )
        sample.gt_instances = InstanceData(
            bboxes=torch.cat([corner, corner + sides], 1),
            labels=torch.randint(0, classes, (count,), generator=random),
        )
        if masks:
            sample.gt_instances.masks = _boxes_as_masks(sample.gt_instances.bboxes)
            pixels = torch.randint(0, CLASSES, (1, SIZE // 8, SIZE // 8), generator=random)
            sample.gt_sem_seg = PixelData(sem_seg=pixels)
        samples.append(sample)
    return dict(inputs=inputs, data_samples=samples)


def _boxes_as_masks(boxes):
    from mmdet.structures.mask import BitmapMasks

    masks = torch.zeros(len(boxes), SIZE, SIZE, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.long()):
        mask[top:bottom, left:right] = 1
    return BitmapMasks(masks.numpy(), SIZE, SIZE)


def train_detector(
    kind, config, batches, host_losses='auto', lr=0.01, prepare=None, wrapper=None, counts=None
):
    """Train a detector, one iteration for each batch.

    Returns:
        dict: ``losses`` of each iteration by name; ``executions``, ``compilations`` and
        ``seconds`` of each; ``state``: parameters and buffers at the end. ``counts`` counts
        executions and compilations of the device, by default those of torch_xla.
    """
    from mmdevplug import init_device
    from mmdevplug.lazy.predictions import training_step
    from mmdevplug.model.place_model import place_model
    from mmdevplug.optim.device_optim_wrapper import DeviceOptimWrapper

    count = counts or xla_counts
    model = _built(config)
    model.init_weights()
    if prepare is not None:
        prepare(model)
    context = init_device('none', kind)
    model = place_model(model, context, host_losses=host_losses).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    wrapper = (wrapper or DeviceOptimWrapper)(optimizer=optimizer)
    found = dict(losses=[], executions=[], compilations=[], seconds=[])
    for data in batches:
        begin, before = time.time(), count()
        with training_step():
            losses = model.train_step(data, wrapper)
        context.materialize()
        found['losses'].append({name: float(value) for name, value in losses.items()})
        executions, compilations = (b - a for a, b in zip(before, count()))
        found['executions'].append(executions)
        found['compilations'].append(compilations)
        found['seconds'].append(time.time() - begin)
    found['state'] = {name: value.cpu() for name, value in model.state_dict().items()}
    return found


def predict_detector(kind, config, batches, state):
    """Let a trained detector find boxes.

    Returns:
        dict: ``predictions`` of each picture; ``executions`` and ``compilations`` of each batch.
    """
    from mmdevplug import init_device
    from mmdevplug.model.place_model import place_model

    model = _built(config)
    model.load_state_dict(state)
    model = place_model(model, init_device('none', kind)).eval()
    found = dict(predictions=[], executions=[], compilations=[])
    for data in batches:
        before = xla_counts()
        with torch.no_grad():
            samples = model.test_step(data)
        for sample in samples:
            found['predictions'].append(
                sample.get('pred_panoptic_seg', sample.get('pred_instances')).cpu()
            )
        executions, compilations = (b - a for a, b in zip(before, xla_counts()))
        found['executions'].append(executions)
        found['compilations'].append(compilations)
    return found


def _built(config):
    from mmdet.utils import register_all_modules

    register_all_modules(init_default_scope=False)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return MODELS.build(ConfigDict(copy.deepcopy(config)))  # heads change theirs


def largest_difference(one, other):
    """The largest difference of two trainings' losses; NaN if there is one."""
    pairs = [(a[name], b[name]) for a, b in zip(one['losses'], other['losses']) for name in a]
    return (torch.tensor(pairs)[:, 0] - torch.tensor(pairs)[:, 1]).abs().max().item()
