# Learning digits from rewards, from the images that the model answers rightly at times; knows
# nothing of devices.
custom_imports = dict(
    imports=['mmdevplug', 'mmdevplug.examples.dynamic_digits'], allow_failed_imports=False
)
default_scope = 'mmengine'

answers = 8
model = dict(
    type='DigitsPolicy',
    answers=answers,
    # Running statistics would be of the images that are kept alone.
    norm=False,
    init_cfg=[
        dict(type='Kaiming', layer='Conv2d'),
        dict(type='Normal', layer='Linear', std=0.01),
    ],
)

# For each rank.
train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    sampler=dict(type='InfiniteSampler', shuffle=True),
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

train_cfg = dict(
    type='DynamicSamplingTrainLoop',
    max_iters=100,
    val_interval=20,
    # Of all ranks together: 64 images that are worth it, with all answers to each.
    target=64 * answers,
    per_group=answers,
    max_resamples=10,
    on_short='fewer',
)
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=6e-3, weight_decay=0.0))
param_scheduler = dict(type='CosineAnnealingLR', eta_min=3e-4, by_epoch=False)

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10, log_metric_by_epoch=False),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=20, max_keep_ckpts=1),
)
log_processor = dict(by_epoch=False)
randomness = dict(seed=0, diff_rank_seed=True)
