"""Small data sets in the formats of OpenMMLab's libraries, written with fixed seeds."""

import json
import pickle
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
from PIL import Image

#: Samples of a data set: two batches of four.
SAMPLES = 8


def _write_image(path: Path, random: np.random.RandomState, height: int, width: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random.randint(0, 256, (height, width, 3)).astype(np.uint8)).save(path)


def make_people(root: Path, size: int = 64) -> Path:
    """Write pictures with one person's 17 keypoints each, in COCO's format."""
    images, annotations = [], []
    for number in range(SAMPLES):
        random = np.random.RandomState(number)
        _write_image(root / 'train2017' / f'{number:012d}.png', random, size, size)
        images.append(dict(id=number, file_name=f'{number:012d}.png', width=size, height=size))
        places = random.randint(8, size - 8, (17, 2))
        annotations.append(
            dict(
                id=number + 1,
                image_id=number,
                category_id=1,
                bbox=[4, 4, size - 8, size - 8],
                area=(size - 8) ** 2,
                iscrowd=0,
                num_keypoints=17,
                keypoints=np.c_[places, np.full(17, 2)].ravel().tolist(),
            )
        )
    person = dict(id=1, name='person', keypoints=[], skeleton=[])
    told = dict(images=images, annotations=annotations, categories=[person])
    (root / 'annotations').mkdir()
    (root / 'annotations' / 'person_keypoints_train2017.json').write_text(json.dumps(told))
    return root


def make_kitti(root: Path) -> Path:
    """Write point clouds of a car and a pedestrian each, with KITTI's list of them."""
    (root / 'points').mkdir()
    # The camera looks along the lidar's x axis; its y axis points down.
    lidar_to_camera = [[0, -1, 0, 0], [0, 0, -1, 0], [1, 0, 0, 0], [0, 0, 0, 1]]
    found = []
    for number in range(SAMPLES):
        random = np.random.RandomState(number)
        background = random.uniform([0, -5, -2, 0], [10, 5, -1.6, 1], (400, 4))
        clouds, instances = [background], []
        for label, (length, width, height) in enumerate([(0.8, 0.6, 1.7), (3.9, 1.6, 1.5)]):
            x, y = random.uniform(2 + 3 * label, 4 + 3 * label), random.uniform(-2, 2)
            inside = random.uniform(-0.5, 0.5, (80, 4)) * [length, width, height, 1]
            clouds.append(inside + [x, y, height / 2 - 1.7, 0.5])
            instances.append(
                dict(
                    bbox=[0.0, 0.0, 10.0, 10.0],
                    bbox_label=2 * label,
                    bbox_3d=[-y, 1.7, x, length, height, width, -np.pi / 2],
                    bbox_label_3d=2 * label,
                    num_lidar_pts=80,
                    difficulty=0,
                )
            )
        name = f'{number:06d}.bin'
        np.concatenate(clouds).astype(np.float32).tofile(str(root / 'points' / name))
        camera = dict(lidar2cam=lidar_to_camera, cam2img=np.eye(4).tolist())
        found.append(
            dict(
                sample_idx=number,
                images=dict(CAM2=camera),
                lidar_points=dict(num_pts_feats=4, lidar_path=name),
                instances=instances,
            )
        )
    classes = dict(Pedestrian=0, Cyclist=1, Car=2)
    told = dict(metainfo=dict(categories=classes, dataset='kitti'), data_list=found)
    (root / 'kitti_infos_train.pkl').write_bytes(pickle.dumps(told))
    return root


def make_pairs(root: Path) -> Path:
    """Write pictures and their fourfold enlargements, for super-resolution."""
    for number in range(SAMPLES):
        random = np.random.RandomState(number)
        _write_image(root / 'small' / f'{number}.png', random, 8, 8)
        _write_image(root / 'large' / f'{number}.png', random, 32, 32)
    return root


def make_clips(root: Path) -> Path:
    """Write videos as folders of frames, with a list of them."""
    lines: List[str] = []
    for number in range(SAMPLES):
        random = np.random.RandomState(number)
        for frame in range(1, 7):
            _write_image(root / f'{number}' / f'img_{frame:05}.png', random, 32, 32)
        lines.append(f'{number} 6 {number % 4}')
    (root / 'train.txt').write_text('\n'.join(lines))
    return root


def make_words(root: Path) -> Path:
    """Write pictures of words, with a list in MMOCR's format."""
    words = ['plug', 'card', 'rank', 'loss', 'batch', 'model', 'torch', 'gloo']
    found: List[Dict[str, Any]] = []
    for number, word in enumerate(words):
        _write_image(root / f'{number}.png', np.random.RandomState(number), 32, 100)
        found.append(dict(img_path=f'{number}.png', instances=[dict(text=word)]))
    metainfo = dict(dataset_type='TextRecogDataset', task_name='textrecog')
    (root / 'train.json').write_text(json.dumps(dict(metainfo=metainfo, data_list=found)))
    return root


def make_dota(root: Path, size: int = 64) -> Path:
    """Write pictures with two turned boxes each, in DOTA's format."""
    (root / 'labels').mkdir()
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    for number in range(SAMPLES):
        random = np.random.RandomState(number)
        _write_image(root / 'images' / f'P{number:04d}.png', random, size, size)
        lines = []
        for name in ('plane', 'ship'):
            angle = random.uniform(-1, 1)
            turn = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
            half = random.uniform([10, 6], [16, 10])
            places = (corners * half) @ turn + random.uniform(20, size - 20, 2)
            figures = ' '.join(f'{value:.2f}' for value in places.ravel())
            lines.append(f'{figures} {name} 0')
        (root / 'labels' / f'P{number:04d}.txt').write_text('\n'.join(lines))
    return root
