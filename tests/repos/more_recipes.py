"""A small model of each further library of OpenMMLab, from a config of its own release.

Only what makes a run small or random is changed: widths and depths, the data set, augmentations
and dropout. So are the learning rates with which rounding errors would grow within ten iterations.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

from tests.repos.coco import make_coco
from tests.repos.imagenet import make_imagenet, resnet18
from tests.repos.more_data import (
    make_clips,
    make_dota,
    make_kitti,
    make_pairs,
    make_people,
    make_words,
)
from tests.repos.training import ITERATIONS, Recipe

#: Of a narrow ResNet-18 and of the neck on it.
WIDTHS, NECK = [8, 16, 32, 64], 16


def _short() -> Dict[str, Any]:
    """Keys for a config that trains some iterations, validates at the end and tests nothing.

    Its batch normalization is not synchronized, which PyTorch's DDP refuses on the CPU.
    """
    untested = {f'test_{part}': None for part in ('cfg', 'dataloader', 'evaluator')}
    return dict(
        sync_bn=None,
        train_cfg=dict(
            _delete_=True, type='IterBasedTrainLoop', max_iters=ITERATIONS, val_interval=ITERATIONS
        ),
        default_hooks=dict(
            logger=dict(interval=1),
            checkpoint=dict(
                _delete_=True, type='CheckpointHook', interval=ITERATIONS, by_epoch=False
            ),
        ),
        param_scheduler=[dict(type='LinearLR', start_factor=0.5, by_epoch=False, begin=0, end=5)],
        **untested,
    )


def _config(library: str, name: str) -> str:
    """The path of a config in the release of a library that is installed."""
    (folder,) = find_spec(library).submodule_search_locations
    return str(Path(folder) / '.mim' / 'configs' / name)


def _data(val: Dict[str, Any], **dataset: Any) -> Dict[str, Any]:
    """Keys for the data of training, and what differs in that of validation."""
    return dict(
        train_dataloader=dict(dataset=dataset), val_dataloader=dict(dataset={**dataset, **val})
    )


def pretrain(root: Path) -> Recipe:
    """mmpretrain: ResNet-18."""
    recipe = resnet18(make_imagenet(root))
    return Recipe(recipe.base, {**recipe.changes, **_short()})


def pose(root: Path) -> Recipe:
    """mmpose: heatmaps of keypoints on MobileNetV2."""
    codec = dict(type='MSRAHeatmap', input_size=(64, 64), heatmap_size=(16, 16), sigma=2)
    annotations = 'annotations/person_keypoints_train2017.json'
    load = [
        dict(type='LoadImage'),
        dict(type='GetBBoxCenterScale'),
        dict(type='TopdownAffine', input_size=codec['input_size']),
    ]
    return Recipe(
        _config(
            'mmpose',
            'body_2d_keypoint/topdown_heatmap/coco/td-hm_mobilenetv2_8xb64-210e_coco-256x192.py',
        ),
        dict(
            model=dict(
                backbone=dict(init_cfg=None, widen_factor=0.25),
                head=dict(deconv_out_channels=(16, 16, 16), in_channels=1280, decoder=codec),
            ),
            **_data(
                dict(
                    ann_file=annotations,
                    bbox_file=None,
                    data_prefix=dict(img='train2017/'),
                    pipeline=[*load, dict(type='PackPoseInputs')],
                ),
                data_root=f'{make_people(root)}/',
                pipeline=[
                    *load,
                    dict(type='GenerateTarget', encoder=codec),
                    dict(type='PackPoseInputs'),
                ],
            ),
            val_evaluator=dict(ann_file=str(root / annotations)),
            **_short(),
        ),
    )


def detection_3d(root: Path) -> Recipe:
    """mmdet3d: PointPillars on a tenth of its range, with a narrow backbone."""
    low, high, size = [0, -5.12, -3], [10.24, 5.12, 1], [0.16, 0.16, 4]
    near = [*low, *high]
    data = dict(data_root=str(make_kitti(root)), data_prefix=dict(pts='points'))
    load = dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=4, use_dim=4)
    ranges = [[*low[:2], z, *high[:2], z] for z in (-0.6, -0.6, -1.78)]
    return Recipe(
        _config('mmdet3d', 'pointpillars/pointpillars_hv_secfpn_8xb6-160e_kitti-3d-3class.py'),
        dict(
            model=dict(
                data_preprocessor=dict(
                    voxel_layer=dict(point_cloud_range=near, max_voxels=(400, 400))
                ),
                voxel_encoder=dict(feat_channels=[8], voxel_size=size, point_cloud_range=near),
                middle_encoder=dict(in_channels=8, output_shape=[64, 64]),
                backbone=dict(in_channels=8, layer_nums=[1, 1, 1], out_channels=[8, 16, 32]),
                neck=dict(in_channels=[8, 16, 32], out_channels=[8, 8, 8]),
                bbox_head=dict(
                    in_channels=24, feat_channels=24, anchor_generator=dict(ranges=ranges)
                ),
            ),
            train_dataloader=dict(
                dataset=dict(
                    dataset=dict(
                        **data,
                        pipeline=[
                            load,
                            dict(type='LoadAnnotations3D', with_bbox_3d=True, with_label_3d=True),
                            dict(type='PointsRangeFilter', point_cloud_range=near),
                            dict(type='ObjectRangeFilter', point_cloud_range=near),
                            dict(
                                type='Pack3DDetInputs',
                                keys=['points', 'gt_labels_3d', 'gt_bboxes_3d'],
                            ),
                        ],
                    )
                )
            ),
            val_dataloader=dict(
                dataset=dict(
                    **data,
                    ann_file='kitti_infos_train.pkl',
                    pipeline=[load, dict(type='Pack3DDetInputs', keys=['points'])],
                )
            ),
            # mmdet3d's own metric computes on CUDA alone.
            val_evaluator=dict(_delete_=True, type='BoxScores'),
            **_short(),
        ),
    )


def super_resolution(root: Path) -> Recipe:
    """mmagic: SRCNN."""
    load = dict(type='LoadImageFromFile', color_type='color', channel_order='rgb')
    return Recipe(
        _config('mmagic', 'srcnn/srcnn_x4k915_1xb16-1000k_div2k.py'),
        dict(
            model=dict(generator=dict(channels=(3, 8, 4, 3))),
            **_data(
                {},
                ann_file='',
                data_root=str(make_pairs(root)),
                data_prefix=dict(_delete_=True, img='small', gt='large'),
                pipeline=[
                    dict(load, key='img'),
                    dict(load, key='gt'),
                    dict(type='SetValues', dictionary=dict(scale=4)),
                    dict(type='PackInputs'),
                ],
            ),
            **_short(),
        ),
    )


def action(root: Path) -> Recipe:
    """mmaction2: TSN on ResNet-18."""
    return Recipe(
        _config(
            'mmaction',
            'recognition/tsn/tsn_imagenet-pretrained-r50_8xb32-1x1x3-100e_kinetics400-rgb.py',
        ),
        dict(
            model=dict(
                backbone=dict(pretrained=None, depth=18),
                cls_head=dict(num_classes=4, in_channels=512, dropout_ratio=0.0),
            ),
            **_data(
                dict(test_mode=True),
                _delete_=True,
                type='RawframeDataset',
                ann_file=str(make_clips(root) / 'train.txt'),
                data_prefix=dict(img=str(root)),
                filename_tmpl='img_{:05}.png',
                pipeline=[
                    dict(
                        type='SampleFrames',
                        clip_len=1,
                        frame_interval=1,
                        num_clips=3,
                        test_mode=True,
                    ),
                    dict(type='RawFrameDecode'),
                    dict(type='FormatShape', input_format='NCHW'),
                    dict(type='PackActionInputs'),
                ],
            ),
            **_short(),
        ),
    )


def text(root: Path) -> Recipe:
    """mmocr: CRNN, with an LSTM and the CTC loss."""
    keys = ('img_path', 'ori_shape', 'img_shape', 'valid_ratio')
    words = dict(type='OCRDataset', data_root=str(make_words(root)), ann_file='train.json')
    pipeline = [
        dict(type='LoadImageFromFile', color_type='grayscale'),
        dict(type='LoadOCRAnnotations', with_text=True),
        dict(type='Resize', scale=(100, 32), keep_ratio=False),
        dict(type='PackTextRecogInputs', meta_keys=keys),
    ]
    return Recipe(
        _config('mmocr', 'textrecog/crnn/crnn_mini-vgg_5e_mj.py'),
        dict(
            optim_wrapper=dict(optimizer=dict(lr=0.05)),
            train_dataloader=dict(dataset=dict(_delete_=True, pipeline=pipeline, **words)),
            val_dataloader=dict(
                dataset=dict(
                    _delete_=True,
                    type='ConcatDataset',
                    datasets=[dict(words, test_mode=True)] * 2,
                    pipeline=pipeline,
                )
            ),
            val_evaluator=dict(dataset_prefixes=['one', 'other']),
            **_short(),
        ),
    )


def rotated_boxes(root: Path) -> Recipe:
    """mmrotate: RetinaNet for turned boxes on a narrow ResNet-18."""
    load = [
        dict(type='mmdet.LoadImageFromFile'),
        dict(type='mmdet.LoadAnnotations', with_bbox=True, box_type='qbox'),
        dict(type='ConvertBoxType', box_type_mapping=dict(gt_bboxes='rbox')),
        dict(type='mmdet.Resize', scale=(64, 64), keep_ratio=True),
    ]
    keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')
    return Recipe(
        _config('mmrotate', 'rotated_retinanet/rotated-retinanet-rbox-le90_r50_fpn_1x_dota.py'),
        dict(
            model=dict(
                backbone=dict(depth=18, init_cfg=None, stem_channels=8, base_channels=8),
                neck=dict(in_channels=WIDTHS, out_channels=NECK),
                bbox_head=dict(in_channels=NECK, feat_channels=NECK, stacked_convs=1),
            ),
            **_data(
                dict(pipeline=[*load, dict(type='mmdet.PackDetInputs', meta_keys=keys)]),
                data_root=str(make_dota(root)),
                ann_file='labels',
                data_prefix=dict(img_path='images'),
                img_shape=(64, 64),
                pipeline=[*load, dict(type='mmdet.PackDetInputs')],
            ),
            **_short(),
        ),
    )


def yolo(root: Path) -> Recipe:
    """mmyolo: YOLOv5 of its smallest size, with an average of its weights."""
    keys = ('img_id', 'img_path', 'ori_shape', 'img_shape')
    data = dict(
        data_root=f'{make_coco(root, train=8, val=3)}/', metainfo=dict(classes=['red', 'blue'])
    )
    load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)]
    training = _short()
    training['default_hooks']['param_scheduler'] = dict(warmup_bias_lr=0.001)
    return Recipe(
        _config('mmyolo', 'yolov5/yolov5_n-v61_syncbn_fast_8xb16-300e_coco.py'),
        dict(
            training,
            optim_wrapper=dict(optimizer=dict(lr=0.001)),
            model=dict(bbox_head=dict(head_module=dict(num_classes=2))),
            param_scheduler=None,
            train_dataloader=dict(
                dataset=dict(
                    **data,
                    filter_cfg=dict(min_size=1),
                    pipeline=[*load, dict(type='mmdet.PackDetInputs', meta_keys=keys)],
                )
            ),
            val_dataloader=dict(
                dataset=dict(
                    **data,
                    batch_shapes_cfg=None,
                    pipeline=[
                        load[0],
                        dict(type='YOLOv5KeepRatioResize', scale=(64, 64)),
                        dict(
                            type='LetterResize',
                            scale=(64, 64),
                            allow_scale_up=False,
                            pad_val=dict(img=114),
                        ),
                        load[1],
                        dict(
                            type='mmdet.PackDetInputs',
                            meta_keys=(*keys, 'scale_factor', 'pad_param'),
                        ),
                    ],
                )
            ),
            val_evaluator=dict(ann_file=str(root / 'annotations' / 'instances_val2017.json')),
        ),
    )


#: The module of a library, and what writes the data of a model of it and describes its training.
RECIPES: Dict[str, Tuple[str, Callable[[Path], Recipe]]] = {
    'mmpretrain-resnet18': ('mmpretrain', pretrain),
    'mmpose-mobilenetv2': ('mmpose', pose),
    'mmdet3d-pointpillars': ('mmdet3d', detection_3d),
    'mmagic-srcnn': ('mmagic', super_resolution),
    'mmaction2-tsn': ('mmaction', action),
    'mmocr-crnn': ('mmocr', text),
    'mmrotate-retinanet': ('mmrotate', rotated_boxes),
    'mmyolo-yolov5': ('mmyolo', yolo),
}
