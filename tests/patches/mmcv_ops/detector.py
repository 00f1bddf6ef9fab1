"""A tiny Faster R-CNN, from mmdet's own config, trained and asked for boxes on any device."""

import torch
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.registry import DATASETS
from mmengine.structures import InstanceData
from torch.utils.data import Dataset

from mmdevplug.patches.mmcv_ops import host_use
from mmdevplug.runner import DeviceRunner
from tests.jobs import install_card, note

CONFIG = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'
SIZE = 64
ITERATIONS = 2


@DATASETS.register_module()
class BrightRectangles(Dataset):
    """Pictures of two bright rectangles."""

    def __len__(self):
        return 2 * ITERATIONS

    def __getitem__(self, index):
        from mmdet.structures import DetDataSample

        random = torch.Generator().manual_seed(index)
        image = torch.randint(0, 60, (3, SIZE, SIZE), generator=random, dtype=torch.uint8)
        corner = torch.randint(0, 30, (2, 2), generator=random)
        boxes = torch.cat([corner, corner + torch.tensor([[20, 28], [30, 16]])], 1)
        for label, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
            image[label, y1:y2, x1:x2] = 250
        sample = DetDataSample(
            metainfo=dict(
                img_id=index,
                img_shape=(SIZE, SIZE),
                ori_shape=(SIZE, SIZE),
                pad_shape=(SIZE, SIZE),
                scale_factor=(1.0, 1.0),
            )
        )
        sample.gt_instances = InstanceData(bboxes=boxes.float(), labels=torch.tensor([0, 1]))
        return dict(inputs=image, data_samples=sample)


def detector_config():
    """mmdet's Faster R-CNN with few channels; nothing is drawn at random."""
    cfg = get_config(CONFIG)
    cfg.merge_from_dict(
        dict(
            model=dict(
                backbone=dict(
                    depth=18, stem_channels=8, base_channels=8, init_cfg=None, norm_eval=False
                ),
                neck=dict(in_channels=[8, 16, 32, 64], out_channels=8),
                rpn_head=dict(in_channels=8, feat_channels=8),
                roi_head=dict(
                    bbox_roi_extractor=dict(out_channels=8),
                    bbox_head=dict(in_channels=8, fc_out_channels=16, num_classes=2),
                ),
            )
        )
    )
    model = cfg.model
    model.backbone.frozen_stages = -1
    for part in (model.train_cfg.rpn, model.train_cfg.rcnn):
        # More than there are, so that none is drawn.
        part.sampler.num = 100_000
    model.train_cfg.rpn_proposal.update(nms_pre=60, max_per_img=20)
    model.test_cfg.rpn.update(nms_pre=60, max_per_img=20)
    model.test_cfg.rcnn.update(score_thr=0.0, max_per_img=5)
    return model


def train_detector(accelerator, work_dir, wrapper='OptimWrapper'):
    """Train for some iterations, then detect.

    Returns:
        dict: ``losses``, ``boxes`` and ``scores`` of two pictures, ``uses`` (calls of operators
        on the host) and ``log``.
    """
    import mmdet.models  # noqa: F401
    from mmdet.utils import register_all_modules

    install_card(accelerator)
    register_all_modules()
    torch.manual_seed(0)
    loader = dict(
        dataset=dict(type='BrightRectangles'),
        batch_size=2,
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='pseudo_collate'),
    )
    cfg = Config(
        dict(
            model=detector_config(),
            work_dir=str(work_dir),
            default_scope='mmdet',
            train_dataloader=loader,
            train_cfg=dict(by_epoch=False, max_iters=ITERATIONS, val_interval=100),
            optim_wrapper=dict(type=wrapper, optimizer=dict(type='SGD', lr=0.01)),
            accelerator=dict(type=accelerator),
            randomness=dict(seed=0),
            default_hooks=dict(checkpoint=None),
        )
    )
    runner = DeviceRunner.from_cfg(cfg)
    losses = note(
        runner,
        'after_train_iter',
        lambda *_, outputs, **__: {name: float(value) for name, value in outputs.items()},
    )
    runner.train()
    runner.model.eval()
    pictures = BrightRectangles()
    batch = [pictures[0], pictures[1]]
    with torch.no_grad():
        found = runner.model.test_step(
            {key: [sample[key] for sample in batch] for key in ('inputs', 'data_samples')}
        )
    instances = [one.pred_instances for one in found]
    return dict(
        losses=losses,
        boxes=[one.bboxes.cpu().numpy() for one in instances],
        scores=[one.scores.cpu().numpy() for one in instances],
        uses=host_use(),
        log='\n'.join(path.read_text() for path in work_dir.glob('*/*.log')),
    )
