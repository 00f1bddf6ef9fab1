# A small convolutional classifier on scikit-learn's digits; knows nothing of devices.
custom_imports = dict(imports=['mmdevplug.examples.digits'], allow_failed_imports=False)
default_scope = 'mmengine'

model = dict(
    type='DigitsClassifier',
    init_cfg=[dict(type='Kaiming', layer='Conv2d'), dict(type='Normal', layer='Linear', std=0.01)],
)

# For each rank: two ranks make a batch of 128.
train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='DigitsDataset', split='train'),
)
val_dataloader = dict(
    batch_size=60,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='DigitsDataset', split='test'),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='DigitsAccuracy')
test_evaluator = val_evaluator

train_cfg = dict(by_epoch=True, max_epochs=16, val_interval=4)
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='SGD', lr=0.03, momentum=0.9, weight_decay=1e-2)
)
param_scheduler = dict(
    type='CosineAnnealingLR', eta_min=1e-3, by_epoch=True, convert_to_iter_based=True
)
auto_scale_lr = dict(enable=False, base_batch_size=128)

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10),
    checkpoint=dict(type='CheckpointHook', interval=4, max_keep_ckpts=1),
)
randomness = dict(seed=0)
