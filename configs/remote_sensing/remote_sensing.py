# A vision transformer with mmseg's UPerHead and an auxiliary FCNHead, both with SyncBN, on aerial
# tiles of LoveDA's classes; knows nothing of devices.
_base_ = ['mmseg::_base_/models/upernet_vit-b16_ln_mln.py', 'mmseg::_base_/default_runtime.py']

# The tiles are drawn. For LoveDA: `_base_` also names 'mmseg::_base_/datasets/loveda.py', and
# custom_imports, the pipelines, the data loaders and the evaluators below are left out. For
# folders of your own: type='BaseSegDataset', data_root, data_prefix and metainfo, and
# LoadImageFromFile and LoadAnnotations in the place of DrawTile.
custom_imports = dict(imports=['mmdevplug.examples.remote_sensing'], allow_failed_imports=False)

size = (64, 64)  # 512 by 512 for real tiles
width = 64  # 768 for ViT-B
classes = 7

model = dict(
    # Nothing is downloaded; pretrained='vit.pth' begins with weights of yours.
    pretrained=None,
    data_preprocessor=dict(size=size),
    backbone=dict(
        img_size=size,
        patch_size=8,
        embed_dims=width,
        num_layers=4,
        num_heads=4,
        out_indices=(0, 1, 2, 3),
    ),
    neck=dict(in_channels=[width] * 4, out_channels=32),
    decode_head=dict(in_channels=[32] * 4, channels=32, num_classes=classes),
    auxiliary_head=dict(in_channels=32, channels=32, num_classes=classes),
)

train_pipeline = [
    dict(type='DrawTile'),
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PackSegInputs'),
]
test_pipeline = [dict(type='DrawTile'), dict(type='PackSegInputs')]

# For each rank: two ranks make a batch of 16.
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(type='AerialTiles', split='train', tiles=512, pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='AerialTiles', split='val', tiles=64, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator

max_iters = 100
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=50)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=10),
    dict(type='PolyLR', eta_min=1e-5, power=0.9, by_epoch=False, begin=10, end=max_iters),
]
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10, log_metric_by_epoch=False),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=50, max_keep_ckpts=1),
)
randomness = dict(seed=0)
