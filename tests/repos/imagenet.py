"""What mmpretrain's models are trained on in tests: small pictures, in ImageNet's folders."""

from pathlib import Path
from typing import Any, Dict

import numpy as np
from PIL import Image

from tests.repos.training import ITERATIONS, Recipe, epoch_schedule

SIZE = 64
BATCH = 4
#: A class each; the default metric wants at least five.
COLOURS = {
    'blue': (40, 60, 200),
    'green': (30, 160, 60),
    'grey': (128, 128, 128),
    'red': (200, 40, 40),
    'white': (240, 240, 240),
    'yellow': (220, 200, 40),
}


def picture(colour: tuple, number: int) -> np.ndarray:
    """A disc of a colour on noise, a bit larger than what is trained on."""
    random = np.random.RandomState(number)
    height, width = SIZE + random.randint(8, 24, 2)
    image = random.normal(90, 30, (height, width, 3))
    rows, columns = np.mgrid[:height, :width]
    top, left = random.randint(SIZE // 2 - 6, SIZE // 2 + 18, 2)
    image[(rows - top) ** 2 + (columns - left) ** 2 < random.randint(16, 26) ** 2] = colour
    return image.clip(0, 255).astype(np.uint8)


def make_imagenet(root: Path, train: int = BATCH * ITERATIONS // 2, val: int = 7) -> Path:
    """Write pictures where ``ImageNet`` looks for them: a folder for each class."""
    for split, numbers in (('train', range(train)), ('val', range(train, train + val))):
        for name in COLOURS:
            (root / split / name).mkdir(parents=True)
        for number in numbers:
            name = list(COLOURS)[number % len(COLOURS)]
            Image.fromarray(picture(COLOURS[name], number)).save(
                root / split / name / f'{number:04d}.png'
            )
    return root


def _common(root: Path) -> Dict[str, Any]:
    """Small pictures, nothing random."""
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='ResizeEdge', scale=SIZE + 8, edge='short'),
        dict(type='CenterCrop', crop_size=SIZE),
        dict(type='PackInputs'),
    ]
    dataset = dict(
        dataset=dict(data_root=str(root), metainfo=dict(classes=list(COLOURS)), pipeline=pipeline)
    )
    return dict(
        data_preprocessor=dict(num_classes=len(COLOURS)),
        train_dataloader=dataset,
        val_dataloader=dataset,
        test_dataloader=dataset,
        **epoch_schedule(),
    )


def resnet18(root: Path) -> Recipe:
    """A narrow ResNet-18, with its batch normalization synchronized."""
    return Recipe(
        'mmpretrain::resnet/resnet18_8xb32_in1k.py',
        dict(
            model=dict(
                backbone=dict(stem_channels=8, base_channels=8),
                head=dict(num_classes=len(COLOURS), in_channels=64),
            ),
            sync_bn='auto',
            optim_wrapper=dict(optimizer=dict(lr=0.02)),
            **_common(root),
        ),
        BATCH,
    )


def vision_transformer(root: Path) -> Recipe:
    """A ViT of two narrow layers, without dropout and without mixing of images."""
    arch = dict(_delete_=True, embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=64)
    return Recipe(
        'mmpretrain::vision_transformer/vit-base-p16_64xb64_in1k.py',
        dict(
            model=dict(
                backbone=dict(arch=arch, img_size=SIZE, drop_rate=0.0),
                head=dict(num_classes=len(COLOURS), in_channels=32, hidden_dim=32),
                train_cfg=None,
            ),
            param_scheduler=[dict(type='CosineAnnealingLR', T_max=2, by_epoch=True)],
            **_common(root),
        ),
        BATCH,
    )
