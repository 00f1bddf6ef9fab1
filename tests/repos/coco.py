"""What mmdet's models are trained on in tests: small pictures with boxes, in COCO's format."""

import json
from pathlib import Path
from typing import Any, Dict

import numpy as np
from PIL import Image

from tests.repos.training import ITERATIONS, Recipe, epoch_schedule

SIZE = 64
BATCH = 4
#: A category each.
COLOURS = {'red': (210, 40, 40), 'blue': (40, 60, 210)}
#: Of the narrow ResNet-18 and of the neck.
WIDTHS, NECK = [8, 16, 32, 64], 16


def boxes_of(number: int) -> list:
    """The left, top, width and height of a box of each category.

    Pictures come in pairs with the same boxes. Detectors divide their losses by the number of
    positive anchors on their own rank; this way two ranks, which get one picture of each pair,
    have equally many, and the average of their losses is the loss of one process.

    There are two such layouts, in two orders: a lazy device compiles for each number of boxes.
    """
    pair = number // 2
    random = np.random.RandomState(1000 + (pair + pair // 2) % 2)
    found = []
    for _ in COLOURS:
        width, height = random.randint(22, 40, 2)
        left, top = random.randint(0, SIZE - width), random.randint(0, SIZE - height)
        found.append([int(value) for value in (left, top, width, height)])
    return found


def scene(number: int) -> np.ndarray:
    """A picture of coloured boxes on noise."""
    random = np.random.RandomState(number)
    image = random.normal(110, 25, (SIZE, SIZE, 3))
    for (left, top, width, height), colour in zip(boxes_of(number), COLOURS.values()):
        patch = image[top : top + height, left : left + width]
        patch[:] = np.asarray(colour) + random.normal(0, 15, patch.shape)
    return image.clip(0, 255).astype(np.uint8)


def make_coco(root: Path, train: int = BATCH * ITERATIONS // 2, val: int = 5) -> Path:
    """Write pictures and annotations where ``CocoDataset`` looks for them."""
    (root / 'annotations').mkdir()
    for split, numbers in (('train', range(train)), ('val', range(train, train + val))):
        (root / f'{split}2017').mkdir()
        images, annotations = [], []
        for number in numbers:
            name = f'{number:012d}.png'
            Image.fromarray(scene(number)).save(root / f'{split}2017' / name)
            images.append(dict(id=number, file_name=name, width=SIZE, height=SIZE))
            for category, box in enumerate(boxes_of(number)):
                annotations.append(
                    dict(
                        id=len(annotations) + 1,
                        image_id=number,
                        category_id=category,
                        bbox=box,
                        area=box[2] * box[3],
                        iscrowd=0,
                    )
                )
        categories = [dict(id=index, name=name) for index, name in enumerate(COLOURS)]
        told = dict(images=images, annotations=annotations, categories=categories)
        (root / 'annotations' / f'instances_{split}2017.json').write_text(json.dumps(told))
    return root


def _common(root: Path) -> Dict[str, Any]:
    """Small pictures, nothing random, and rates for ten iterations."""
    load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)]
    resize = dict(type='Resize', scale=(SIZE, SIZE), keep_ratio=True)
    keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')
    data = dict(data_root=f'{root}/', metainfo=dict(classes=list(COLOURS)))
    train = dict(dataset=dict(pipeline=[*load, resize, dict(type='PackDetInputs')], **data))
    packed = dict(type='PackDetInputs', meta_keys=keys)
    val = dict(dataset=dict(pipeline=[load[0], resize, load[1], packed], **data))
    evaluator = dict(ann_file=str(root / 'annotations' / 'instances_val2017.json'))
    return dict(
        train_dataloader=train,
        val_dataloader=val,
        test_dataloader=val,
        val_evaluator=evaluator,
        test_evaluator=evaluator,
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.5, by_epoch=False, begin=0, end=3),
            dict(type='MultiStepLR', milestones=[1], gamma=0.5, by_epoch=True),
        ],
        **epoch_schedule(),
    )


def retinanet(root: Path) -> Recipe:
    """RetinaNet on a narrow ResNet-18, whose first stage is frozen and its statistics too."""
    return Recipe(
        'mmdet::retinanet/retinanet_r18_fpn_1x_coco.py',
        dict(
            model=dict(
                backbone=dict(init_cfg=None, stem_channels=8, base_channels=8),
                neck=dict(in_channels=WIDTHS, out_channels=NECK),
                bbox_head=dict(
                    num_classes=len(COLOURS), in_channels=NECK, feat_channels=NECK, stacked_convs=1
                ),
                test_cfg=dict(nms_pre=100, score_thr=0.0, max_per_img=20),
            ),
            optim_wrapper=dict(optimizer=dict(lr=0.01)),
            **_common(root),
        ),
        BATCH,
    )


def faster_rcnn(root: Path) -> Recipe:
    """Faster R-CNN on a narrow ResNet-18.

    Its samplers take all there is, instead of so many at random, and each picture has the same
    number of proposals.
    """
    proposals = dict(nms_pre=64, max_per_img=16)
    return Recipe(
        'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
        dict(
            model=dict(
                backbone=dict(depth=18, init_cfg=None, stem_channels=8, base_channels=8),
                neck=dict(in_channels=WIDTHS, out_channels=NECK),
                rpn_head=dict(
                    in_channels=NECK, feat_channels=NECK, anchor_generator=dict(scales=[4])
                ),
                roi_head=dict(
                    bbox_roi_extractor=dict(out_channels=NECK),
                    bbox_head=dict(num_classes=len(COLOURS), in_channels=NECK, fc_out_channels=32),
                ),
                train_cfg=dict(
                    rpn=dict(sampler=dict(num=4096)),
                    rpn_proposal=proposals,
                    rcnn=dict(sampler=dict(num=4096)),
                ),
                test_cfg=dict(rpn=proposals, rcnn=dict(score_thr=0.0, max_per_img=20)),
            ),
            optim_wrapper=dict(optimizer=dict(lr=0.02)),
            **_common(root),
        ),
        BATCH,
    )
