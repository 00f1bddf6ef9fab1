"""Synthetic aerial tiles with LoveDA's classes, for models of mmseg; no download."""

from typing import Any, Dict, List

import numpy as np
from mmcv.transforms import BaseTransform
from mmseg.datasets import LoveDADataset
from mmseg.registry import DATASETS, TRANSFORMS

#: For each of LoveDA's classes: the mean colour, and how much pixels differ from it.
GROUND = dict(
    background=((150, 160, 150), 10),
    building=((165, 95, 80), 18),
    road=((120, 120, 125), 6),
    water=((60, 90, 130), 5),
    barren=((190, 170, 130), 14),
    forest=((45, 85, 50), 22),
    agricultural=((140, 165, 75), 10),
)
BACKGROUND, BUILDING, ROAD, WATER, BARREN, FOREST, AGRICULTURAL = range(len(GROUND))


@DATASETS.register_module()
class AerialTiles(LoveDADataset):
    """A list of tiles that :class:`DrawTile` draws.

    Args:
        split (str): ``'train'``, or ``'val'``: other tiles.
        tiles (int): How many there are. Defaults to 512.
        size (int): Pixels of a side. Defaults to 64.
        **kwargs: See :class:`mmseg.datasets.BaseSegDataset`.
    """

    def __init__(
        self, split: str = 'train', tiles: int = 512, size: int = 64, **kwargs: object
    ) -> None:
        if split not in ('train', 'val'):
            raise ValueError(f"split={split!r}: expected 'train' or 'val'.")
        self.split, self.tiles, self.size = split, tiles, size
        super().__init__(reduce_zero_label=False, **kwargs)

    def load_data_list(self) -> List[Dict[str, object]]:
        return [
            dict(
                img_path=f'{self.split}/{number}.png',
                # Splits share no number, whatever their sizes.
                tile=2 * number + (self.split == 'val'),
                tile_size=self.size,
                reduce_zero_label=self.reduce_zero_label,
                seg_fields=[],
            )
            for number in range(self.tiles)
        ]


@TRANSFORMS.register_module()
class DrawTile(BaseTransform):
    """Draw a tile; replaces ``LoadImageFromFile`` and ``LoadAnnotations``."""

    def transform(self, results: Dict[str, Any]) -> Dict[str, object]:
        """Add ``img`` (BGR) and ``gt_seg_map``, which only depend on the tile's number."""
        random = np.random.RandomState(results['tile'])
        labels = draw_ground(random, results['tile_size'])
        results['img'] = paint(random, labels)[..., ::-1]  # as OpenCV reads a file
        results['img_shape'] = results['ori_shape'] = labels.shape
        results['gt_seg_map'] = labels
        results['seg_fields'] = [*results['seg_fields'], 'gt_seg_map']
        return results


def draw_ground(random: np.random.RandomState, size: int) -> np.ndarray:
    """Draw the classes, uint8: fields and woods, a river, a road, and houses along the road."""
    rows, columns = np.mgrid[:size, :size] / size
    # Each point has the class of the nearest centre.
    centres = random.rand(5, 2)
    classes = random.choice([BACKGROUND, BARREN, FOREST, AGRICULTURAL, AGRICULTURAL], 5)
    distances = (rows[..., None] - centres[:, 0]) ** 2 + (columns[..., None] - centres[:, 1]) ** 2
    labels = classes[distances.argmin(axis=-1)].astype(np.uint8)

    bend, width = random.uniform(0.05, 0.15), random.uniform(0.05, 0.1)
    river = random.uniform(0.1, 0.9) + bend * np.sin(6 * columns + random.uniform(0, 6))
    labels[np.abs(rows - river) < width] = WATER

    slope, start = random.uniform(-0.3, 0.3), random.uniform(0.2, 0.7)
    road = start + slope * rows
    for top in random.uniform(0, 0.85, 4):
        height, breadth = random.uniform(0.15, 0.25, 2)
        left = start + slope * top + random.choice([0.09, -0.09 - breadth])
        inside = (rows >= top) & (rows < top + height)
        labels[inside & (columns >= left) & (columns < left + breadth)] = BUILDING
    labels[np.abs(columns - road) < 0.06] = ROAD
    return labels


def paint(random: np.random.RandomState, labels: np.ndarray) -> np.ndarray:
    """Paint classes as an RGB image, uint8, with light that differs from tile to tile."""
    colours = np.array([colour for colour, _ in GROUND.values()], float)
    roughness = np.array([spread for _, spread in GROUND.values()], float)
    noise = random.normal(0, 1, labels.shape) * roughness[labels]
    image = colours[labels] + noise[..., None]
    rows = np.arange(len(labels))
    image[labels == AGRICULTURAL] += 15 * np.sin(rows)[np.where(labels == AGRICULTURAL)[0], None]
    return (image * random.uniform(0.8, 1.2)).clip(0, 255).astype(np.uint8)
