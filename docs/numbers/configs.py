"""Compare the first training step of released configs on an accelerator with that on the CPU.

Each config of :data:`CONFIGS` is made small and compared as ``mmdevplug check`` does, without the
operators that mmdevplug replaces (``before``) and with them (``now``). One process computes, and
another is started where it ends or takes more than :data:`LIMIT` seconds.

python -m docs.numbers.configs --accelerator xla [--configs NAME ...] [--json FILE]

With ``--configs``, rows of these alone are measured, and replaced in the file.
"""

import argparse
import json
import os
import re
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence
from unittest import mock

from docs.numbers.operators import run_part

#: Seconds for a config, with the compiling of its step.
LIMIT = 400
SIZE = 64
_SEG = '4xb2-40k_cityscapes-512x1024'
CONFIGS: Dict[str, Sequence[str]] = {
    'mmpretrain': (
        'lenet/lenet5_mnist',
        'resnet/resnet18_8xb32_in1k',
        'resnet/resnet18_8xb16_cifar10',
        'mobilenet_v2/mobilenet-v2_8xb32_in1k',
        'mobilenet_v3/mobilenet-v3-small_8xb128_in1k',
        'shufflenet_v1/shufflenet-v1-1x_16xb64_in1k',
        'shufflenet_v2/shufflenet-v2-1x_16xb64_in1k',
        'efficientnet/efficientnet-b0_8xb32_in1k',
        'mobileone/mobileone-s0_8xb32_in1k',
        'repvgg/repvgg-A0_8xb32_in1k',
        'convnext/convnext-tiny_32xb128_in1k',
        'vision_transformer/vit-base-p16_64xb64_in1k',
        'deit/deit-tiny_4xb256_in1k',
        'swin_transformer/swin-tiny_16xb64_in1k',
        'poolformer/poolformer-s12_32xb128_in1k',
        'mobilevit/mobilevit-xxsmall_8xb128_in1k',
        'efficientformer/efficientformer-l1_8xb128_in1k',
        'van/van-tiny_8xb128_in1k',
        'levit/levit-128s_8xb256_in1k',
        'mlp_mixer/mlp-mixer-base-p16_64xb64_in1k',
    ),
    'mmseg': (
        f'fcn/fcn_r50-d8_{_SEG}',
        f'pspnet/pspnet_r50-d8_{_SEG}',
        f'deeplabv3/deeplabv3_r50-d8_{_SEG}',
        f'deeplabv3plus/deeplabv3plus_r50-d8_{_SEG}',
        f'ccnet/ccnet_r50-d8_{_SEG}',
        f'danet/danet_r50-d8_{_SEG}',
        f'dmnet/dmnet_r50-d8_{_SEG}',
        'emanet/emanet_r50-d8_4xb2-80k_cityscapes-512x1024',
        f'encnet/encnet_r50-d8_{_SEG}',
        f'isanet/isanet_r50-d8_{_SEG}',
        f'psanet/psanet_r50-d8_{_SEG}',
        f'upernet/upernet_r50_{_SEG}',
        'sem_fpn/fpn_r50_4xb2-80k_cityscapes-512x1024',
        'point_rend/pointrend_r50_4xb2-80k_cityscapes-512x1024',
        'bisenetv1/bisenetv1_r18-d32_4xb4-160k_cityscapes-1024x1024',
        'bisenetv2/bisenetv2_fcn_4xb4-160k_cityscapes-1024x1024',
        'cgnet/cgnet_fcn_4xb4-60k_cityscapes-680x680',
        'erfnet/erfnet_fcn_4xb4-160k_cityscapes-512x1024',
        'fastscnn/fast_scnn_8xb4-160k_cityscapes-512x1024',
        'stdc/stdc1_4xb12-80k_cityscapes-512x1024',
        'pidnet/pidnet-s_2xb6-120k_1024x1024-cityscapes',
        'segformer/segformer_mit-b0_8xb1-160k_cityscapes-1024x1024',
        'segnext/segnext_mscan-t_1xb16-adamw-160k_ade20k-512x512',
        'mobilenet_v3/mobilenet-v3-d8-scratch-s_lraspp_4xb4-320k_cityscapes-512x1024',
    ),
    'mmdet': (
        'retinanet/retinanet_r50_fpn_1x_coco',
        'atss/atss_r50_fpn_1x_coco',
        'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco',
        'foveabox/fovea_r50_fpn_4xb4-1x_coco',
        'fsaf/fsaf_r50_fpn_1x_coco',
        'gfl/gfl_r50_fpn_1x_coco',
        'yolof/yolof_r50-c5_8xb8-1x_coco',
        'rpn/rpn_r50_fpn_1x_coco',
        'faster_rcnn/faster-rcnn_r50_fpn_1x_coco',
        'yolo/yolov3_mobilenetv2_8xb24-320-300e_coco',
        'yolox/yolox_tiny_8xb8-300e_coco',
        'rtmdet/rtmdet_tiny_8xb32-300e_coco',
        'ssd/ssdlite_mobilenetv2-scratch_8xb24-600e_coco',
        'centernet/centernet_r18_8xb16-crop512-140e_coco',
        'detr/detr_r18_8xb2-500e_coco',
    ),
}
#: Sides of pictures, in pixels, where another is needed; LR-ASPP averages over windows of 49.
_SIDES = {'lenet5': 32, 'lraspp': 400}
#: Widths are divided by this in models on ResNet-50: it leaves a channel to each of 32 groups.
_NARROWER = 8
_WIDTHS = re.compile(r'(\w+_)?channels|embed_dims|feedforward_channels')
#: Of classifiers whose widths have names: what is set in place of a size.
_ARCHS: Dict[Any, Dict[str, int]] = dict(
    VisionTransformer=dict(num_heads=3, feedforward_channels=384),
    MlpMixer=dict(tokens_mlp_dims=96, channels_mlp_dims=384),
)
_RESNETS = re.compile(r'(mmpretrain\.)?ResNet(V1[cd])?')


def names() -> List[str]:
    """Every config, as ``library::name``."""
    return [f'{library}::{name}' for library, listed in CONFIGS.items() for name in listed]


def small(name: str, folder: Path, accelerator: str) -> Any:
    """Read a config for one step on small pictures, with ResNet-18 in place of ResNet-50."""
    from tests.repos import coco, imagenet, segmentation
    from tests.repos.training import Recipe, read_config, write_config

    library = name.partition('::')[0]
    data = dict(mmpretrain=imagenet, mmseg=segmentation, mmdet=coco)[library]
    write = dict(mmpretrain='make_imagenet', mmseg='make_cityscapes', mmdet='make_coco')[library]
    root = folder / library
    if not root.exists():
        root.mkdir()
        getattr(data, write)(root)
    dataset = dict(
        mmpretrain=dict(type='ImageNet', data_root=str(root), split='train'),
        mmseg=dict(
            type='CityscapesDataset',
            data_root=str(root),
            data_prefix=dict(img_path='leftImg8bit/train', seg_map_path='gtFine/train'),
        ),
        mmdet=dict(
            type='CocoDataset',
            data_root=f'{root}/',
            ann_file='annotations/instances_train2017.json',
            data_prefix=dict(img='train2017/'),
            metainfo=dict(classes=list(coco.COLOURS)),
        ),
    )[library]
    load = [dict(type='LoadImageFromFile')]
    scale = next((side for part, side in _SIDES.items() if part in name), SIZE)
    resize = dict(type='Resize', scale=(scale, scale), keep_ratio=False)
    dataset['pipeline'] = dict(
        mmpretrain=[*load, dict(resize), dict(type='PackInputs')],
        mmseg=[*load, dict(type='LoadAnnotations'), resize, dict(type='PackSegInputs')],
        mmdet=[*load, dict(type='LoadAnnotations', with_bbox=True), dict(type='PackDetInputs')],
    )[library]
    if 'pidnet' in name:  # learns edges, too
        dataset['pipeline'].insert(-1, dict(type='GenerateEdge', edge_width=4))
    if library == 'mmpretrain':
        dataset['metainfo'] = dict(classes=list(imagenet.COLOURS))
        if 'lenet5' in name:
            load[0]['color_type'] = 'grayscale'
    path = folder / f'{name.replace("::", "_").replace("/", "_")}.py'
    cfg = read_config(write_config(path, Recipe(f'{name}.py'), accelerator)).copy()
    cfg.train_dataloader = dict(
        batch_size=4,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='default_collate' if library == 'mmpretrain' else 'pseudo_collate'),
        dataset=dataset,
    )
    for split in ('val', 'test'):
        for part in ('cfg', 'dataloader', 'evaluator'):
            cfg[f'{split}_{part}'] = None
    cfg.train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=1)
    cfg.update(custom_hooks=[], param_scheduler=None, auto_scale_lr=None)
    cfg.optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01))
    cfg.update(launcher='none', randomness=dict(seed=0))
    shrink(cfg, scale)
    if library == 'mmseg':
        forget_class_weights(cfg.model)
    return cfg


def shrink(cfg: Any, scale: int) -> None:
    """Change what makes a model large, or loads weights from elsewhere."""
    model = cfg.model
    forget_weights(model)
    for part in (model, cfg):
        preprocessor = part.get('data_preprocessor') or {}
        for key, value in dict(size=(scale, scale), batch_augments=None).items():
            if preprocessor.get(key) is not None:
                preprocessor[key] = value
    if 'augments' in (model.get('train_cfg') or {}):  # mixes pictures at random
        model.train_cfg = None
    backbone = model.get('backbone') or {}
    if 'img_size' in backbone:
        backbone.img_size = scale
    if backbone.get('type') in _ARCHS and isinstance(backbone.arch, str):
        backbone.arch = dict(_ARCHS[backbone.type], embed_dims=192, num_layers=4)
        model.head.in_channels = 192
    if _RESNETS.fullmatch(str(backbone.get('type'))) and backbone.get('depth') in (50, 101):
        backbone.update(depth=18, stem_channels=32, base_channels=32)
        for part in list(model.values()):
            if part is not backbone:
                narrow(part)


def narrow(part: Any) -> None:
    """Divide the widths of everything behind a backbone as its own are."""
    if isinstance(part, (list, tuple)):
        for each in part:
            narrow(each)
    elif isinstance(part, dict):
        for key, value in part.items():
            if _WIDTHS.fullmatch(key) and not isinstance(value, dict):
                part[key] = divided(value)
            else:
                narrow(value)


def divided(wide: Any) -> Any:
    """A width, or several."""
    if isinstance(wide, (list, tuple)):
        return [divided(each) for each in wide]
    return wide // _NARROWER if isinstance(wide, int) and wide >= 64 else wide


def forget_weights(part: Any) -> None:
    """Take out weights that would be downloaded."""
    if isinstance(part, dict):
        for key in ('init_cfg', 'pretrained', 'checkpoint'):
            if key in part and part[key] is not None:
                part[key] = None
        for each in part.values():
            forget_weights(each)
    elif isinstance(part, (list, tuple)):
        for each in part:
            forget_weights(each)


def forget_class_weights(part: Any) -> None:
    """Take out weights of classes, of which mmseg 1.2.2 looks up one for ignored pixels."""
    if isinstance(part, dict):
        if part.get('type') == 'CrossEntropyLoss':
            part.pop('class_weight', None)
        for each in part.values():
            forget_class_weights(each)
    elif isinstance(part, (list, tuple)):
        for each in part:
            forget_class_weights(each)


def compare(name: str, plain: bool, folder: Path, accelerator: str) -> Dict[str, Any]:
    """Compare one step: ``equal`` and what ``mmdevplug check`` says."""
    from mmdevplug.checks.one_step import compare_with_cpu

    cfg = small(name, folder, accelerator)
    left_out = mock.patch('mmdevplug.patches.torch_xla.patch_operators', return_value=None)
    with left_out if plain else nullcontext():
        findings = compare_with_cpu(cfg)
    return dict(
        equal=all(each.level == 'ok' for each in findings),
        level=findings[0].level,
        said='; '.join(each.found for each in findings),
    )


def work(args: argparse.Namespace) -> None:
    """Compare from one number on, and print a line before and after each."""
    from mmengine.utils import import_modules_from_strings

    items = [(name, plain) for name in args.configs for plain in (True, False)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, plain) in enumerate(items):
            if number < args.begin:
                continue
            told = dict(name=name, plain=plain)
            print(json.dumps(dict(told, begins=number)), flush=True)
            import_modules_from_strings([f'{name.partition("::")[0]}.models'])
            try:
                row = compare(name, plain, Path(folder), args.accelerator)
            except Exception as error:
                row = dict(equal=False, failed=f'{type(error).__name__}: {str(error)[:300]}')
            print(json.dumps(dict(told, **row, ends=number)), flush=True)


def main(argv: Optional[Sequence[str]] = None) -> Dict[str, Any]:
    """Compare, print a line for each config, and return all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--accelerator', required=True)
    parser.add_argument('--configs', nargs='+', choices=names(), default=names(), metavar='NAME')
    parser.add_argument('--json')
    parser.add_argument('--limit', type=float, default=LIMIT, help='seconds for a config')
    parser.add_argument('--begin', type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument('--part', type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument('--parts', type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:
        work(args)
        return {}
    import torch

    release = torch.__version__.split('+')[0]
    found: Dict[str, Any] = dict(accelerator=args.accelerator, torch=release, rows={})
    path = Path(args.json) if args.json else None
    if path is not None and path.exists() and args.configs != names():
        found['rows'] = json.loads(path.read_text(encoding='utf-8'))['rows']

    def note(line: Dict[str, Any]) -> None:
        row = found['rows'].setdefault(line['name'], {})
        kept = {
            key: line[key] for key in ('equal', 'level', 'said', 'failed', 'ended') if key in line
        }
        row['before' if line['plain'] else 'now'] = kept
        print(line['name'], 'before' if line['plain'] else 'now', kept, flush=True)
        if path is not None:
            path.write_text(json.dumps(found, indent=1) + '\n', encoding='utf-8')

    options = ['--accelerator', args.accelerator, '--configs', *args.configs]
    run_part('docs.numbers.configs', options, 0, 1, note, args.limit)
    return found


if __name__ == '__main__':
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    main()
