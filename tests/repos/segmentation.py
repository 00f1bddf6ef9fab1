"""What mmseg's models are trained on in tests: pictures of streets, in Cityscapes' format."""

from pathlib import Path
from typing import Any, Dict

import numpy as np
from PIL import Image

from tests.repos.training import Recipe, iteration_schedule

SIZE = 32

#: Cityscapes' train ids, and a colour for each; 255 is not labelled.
COLOURS = {
    10: (70, 130, 180),
    2: (90, 60, 60),
    0: (128, 64, 128),
    13: (10, 20, 190),
    255: (0,) * 3,
}


def street(number: int):
    """A picture: sky, houses, a road with a car, and a border that nobody labelled.

    Returns:
        tuple: An RGB image of shape (32, 32, 3), and train ids of shape (32, 32).
    """
    random = np.random.RandomState(number)
    labels = np.zeros((SIZE, SIZE), np.uint8)
    sky, houses = random.randint(6, 12), random.randint(16, 20)
    labels[:sky] = 10
    labels[sky:houses] = 2
    top, left = random.randint(18, 22), random.randint(2, 20)
    labels[top : top + 7, left : left + 10] = 13
    labels[-random.randint(1, 3) :] = 255
    image = np.zeros((SIZE, SIZE, 3))
    for train_id, colour in COLOURS.items():
        image[labels == train_id] = colour
    # Light differs: the mean of a picture is normalized over a batch, and is not to be constant.
    noisy = image * random.uniform(0.5, 1.5) + random.normal(0, 12, image.shape)
    return noisy.clip(0, 255).astype(np.uint8), labels


def make_cityscapes(root: Path, train: int = 8, val: int = 4) -> Path:
    """Write pictures where ``CityscapesDataset`` looks for them."""
    for split, numbers in (('train', range(train)), ('val', range(train, train + val))):
        for folder in ('leftImg8bit', 'gtFine'):
            (root / folder / split / 'town').mkdir(parents=True)
        for number in numbers:
            image, labels = street(number)
            name = f'town_{number:06d}_000019'
            Image.fromarray(image).save(
                root / 'leftImg8bit' / split / 'town' / f'{name}_leftImg8bit.png'
            )
            Image.fromarray(labels).save(
                root / 'gtFine' / split / 'town' / f'{name}_gtFine_labelTrainIds.png'
            )
    return root


def _common(root: Path) -> Dict[str, Any]:
    """Small pictures, nothing random, and rates for ten iterations instead of 160,000."""
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations'),
        dict(type='PackSegInputs'),
    ]
    dataset = dict(dataset=dict(data_root=str(root), pipeline=pipeline))
    return dict(
        train_dataloader=dataset,
        val_dataloader=dataset,
        test_dataloader=dataset,
        **iteration_schedule(),
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.5, by_epoch=False, begin=0, end=3),
            dict(type='PolyLR', eta_min=0.0, power=0.9, begin=3, end=20, by_epoch=False),
        ],
    )


def segformer(root: Path) -> Recipe:
    """SegFormer with two narrow stages of its mix transformer, tested on sliding windows."""
    return Recipe(
        'mmseg::segformer/segformer_mit-b0_8xb1-160k_cityscapes-1024x1024.py',
        dict(
            model=dict(
                data_preprocessor=dict(size=(SIZE, SIZE)),
                backbone=dict(
                    init_cfg=None,
                    embed_dims=8,
                    num_stages=2,
                    num_layers=[1, 1],
                    num_heads=[1, 2],
                    patch_sizes=[7, 3],
                    strides=[4, 2],
                    sr_ratios=[4, 2],
                    out_indices=(0, 1),
                    drop_path_rate=0.0,
                ),
                decode_head=dict(
                    in_channels=[8, 16], in_index=[0, 1], channels=16, dropout_ratio=0.0
                ),
                test_cfg=dict(crop_size=(SIZE, 24), stride=(SIZE, 16)),
            ),
            optim_wrapper=dict(optimizer=dict(lr=2e-3)),
            **_common(root),
        ),
    )


def deeplabv3plus(root: Path) -> Recipe:
    """DeepLabV3+ on three narrow stages of ResNet-18: synchronized layers, and two heads."""
    head = dict(dropout_ratio=0.0)
    return Recipe(
        'mmseg::deeplabv3plus/deeplabv3plus_r18-d8_4xb2-80k_cityscapes-512x1024.py',
        dict(
            model=dict(
                pretrained=None,
                data_preprocessor=dict(size=(SIZE, SIZE)),
                backbone=dict(
                    stem_channels=8,
                    base_channels=8,
                    num_stages=3,
                    strides=(1, 2, 1),
                    dilations=(1, 1, 2),
                    out_indices=(0, 1, 2),
                ),
                decode_head=dict(
                    c1_in_channels=8,
                    c1_channels=4,
                    in_channels=32,
                    in_index=2,
                    channels=8,
                    dilations=(1, 2, 4),
                    **head,
                ),
                auxiliary_head=dict(in_channels=16, in_index=1, channels=8, **head),
            ),
            optim_wrapper=dict(optimizer=dict(lr=0.02)),
            **_common(root),
        ),
    )


def vit(root: Path) -> Recipe:
    """A plain vision transformer, a neck of several levels and a UPerHead, on Cityscapes."""
    pictures = {
        split: dict(
            _delete_=True,
            type='CityscapesDataset',
            data_root=str(root),
            data_prefix=dict(img_path=f'leftImg8bit/{split}', seg_map_path=f'gtFine/{split}'),
            pipeline=_common(root)['train_dataloader']['dataset']['pipeline'],
        )
        for split in ('train', 'val')
    }
    head = dict(num_classes=19, dropout_ratio=0.0)
    return Recipe(
        'mmseg::vit/vit_deit-s16_mln_upernet_8xb2-160k_ade20k-512x512.py',
        dict(
            _common(root),
            model=dict(
                pretrained=None,
                data_preprocessor=dict(size=(SIZE, SIZE)),
                backbone=dict(
                    img_size=(SIZE, SIZE),
                    patch_size=8,
                    embed_dims=16,
                    num_layers=2,
                    num_heads=2,
                    out_indices=(0, 1),
                    drop_path_rate=0.0,
                ),
                neck=dict(in_channels=[16, 16], out_channels=16, scales=[2, 1]),
                decode_head=dict(
                    in_channels=[16, 16], in_index=[0, 1], channels=16, pool_scales=(1, 2), **head
                ),
                auxiliary_head=dict(in_channels=16, in_index=1, channels=8, **head),
            ),
            train_dataloader=dict(dataset=pictures['train']),
            val_dataloader=dict(dataset=pictures['val']),
            test_dataloader=dict(dataset=pictures['val']),
            optim_wrapper=dict(optimizer=dict(lr=1e-3)),
        ),
    )
