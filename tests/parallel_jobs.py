"""Models over several devices: small trainings of real models, whose weights are compared."""

import os

import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS, RUNNERS
from torch import nn

from tests.columns import backend_of
from tests.jobs import install_card, trained_weights

STEPS = 10
SAMPLES = 80


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        # Batch normalization takes a bias away again: its gradient is rounding alone.
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


@MODELS.register_module()
class SpreadClassifier(BaseModel):
    """A stem, blocks, a head, and a parameter and a buffer of the model's own."""

    def __init__(self, width=8, depth=6, dropout=0.0, frozen=False, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        for block in self.blocks if frozen else ():
            block.conv.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))
        self.register_buffer('shift', torch.zeros(width, 1, 1))

    def forward(self, inputs, labels, mode='tensor'):
        x = self.scale * self.stem(inputs) + self.shift
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.dropout(x.mean((2, 3))))
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits, labels))
        return logits.argmax(1)


@MODELS.register_module()
class SpreadLlama(BaseModel):
    """transformers' Llama, tiny."""

    def __init__(self, tied=False, data_preprocessor=None):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__(data_preprocessor)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            use_cache=False,
        )
        config._attn_implementation = 'eager'
        self.llama = LlamaForCausalLM(config)

    def forward(self, inputs, labels, mode='tensor'):
        found = self.llama(input_ids=inputs, labels=inputs if mode == 'loss' else None)
        return dict(loss=found.loss) if mode == 'loss' else found.logits


@DATASETS.register_module()
class SpreadImages(torch.utils.data.Dataset):
    def __init__(self, size=8, channels=3):
        self.inputs = torch.randn(SAMPLES, channels, size, size, generator=seeded(1))
        self.labels = torch.randint(0, 4, (SAMPLES,), generator=seeded(2))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return dict(inputs=self.inputs[index], labels=self.labels[index])


@DATASETS.register_module()
class SpreadTokens(SpreadImages):
    def __init__(self):
        super().__init__()
        self.inputs = torch.randint(0, 64, (SAMPLES, 12), generator=seeded(3))


@DATASETS.register_module()
class SpreadScenes(torch.utils.data.Dataset):
    """Images with a class for each pixel, as mmseg has them."""

    def __init__(self, size=16):
        self.inputs = torch.randint(0, 255, (SAMPLES, 3, size, size), generator=seeded(4))
        self.maps = torch.randint(0, 4, (SAMPLES, 1, size, size), generator=seeded(5))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        sample = SegDataSample(gt_sem_seg=PixelData(data=self.maps[index]))
        sample.set_metainfo(dict(img_shape=(16, 16), ori_shape=(16, 16)))
        return dict(inputs=self.inputs[index].to(torch.uint8), data_samples=sample)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def segmentor():
    norm = dict(type='BN', requires_grad=True)
    head = dict(
        type='FCNHead',
        channels=16,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.0,
        num_classes=4,
        norm_cfg=norm,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    )
    return dict(
        type='mmseg.EncoderDecoder',
        data_preprocessor=dict(
            type='mmseg.SegDataPreProcessor',
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
            size=(16, 16),
        ),
        backbone=dict(
            type='mmseg.ResNetV1c',
            depth=18,
            base_channels=8,
            num_stages=2,
            strides=(1, 2),
            dilations=(1, 1),
            out_indices=(0, 1),
            norm_cfg=norm,
            norm_eval=False,
            style='pytorch',
        ),
        decode_head=dict(head, in_channels=16, in_index=1),
        auxiliary_head=dict(head, in_channels=8, in_index=0),
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )


MODELS_OF = dict(
    classifier=(lambda: dict(type='SpreadClassifier'), 'SpreadImages', 'default_collate'),
    llama=(lambda: dict(type='SpreadLlama'), 'SpreadTokens', 'default_collate'),
    tied_llama=(lambda: dict(type='SpreadLlama', tied=True), 'SpreadTokens', 'default_collate'),
    segmentor=(segmentor, 'SpreadScenes', 'pseudo_collate'),
)


def config(kind, accelerator, work_dir, **options):
    """A config for DeviceRunner: ten iterations of SGD with momentum on few random samples."""
    model, dataset, collate = MODELS_OF[kind]
    world_size = int(os.environ.get('WORLD_SIZE', 1))
    cfg = Config(
        dict(
            model=model(),
            default_scope='mmseg' if kind == 'segmentor' else 'mmengine',
            work_dir=str(work_dir),
            experiment_name=f'{kind}_{os.path.basename(str(work_dir))}',
            launcher='pytorch' if 'RANK' in os.environ else 'none',
            runner_type='DeviceRunner',
            accelerator=dict(
                type=accelerator, backend=backend_of(accelerator), initial_weights='host'
            ),
            train_dataloader=dict(
                batch_size=8 // world_size,
                num_workers=0,
                dataset=dict(type=dataset),
                sampler=dict(type='DefaultSampler', shuffle=False),
                collate_fn=dict(type=collate),
            ),
            train_cfg=dict(type='IterBasedTrainLoop', max_iters=STEPS, val_interval=1000),
            optim_wrapper=dict(
                type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01, momentum=0.9)
            ),
            default_hooks=dict(
                checkpoint=dict(type='CheckpointHook', interval=1000, by_epoch=False),
                logger=dict(type='LoggerHook', interval=5),
            ),
            randomness=dict(seed=0),
            log_level='ERROR',
        )
    )
    cfg.merge_from_dict({key.replace('__', '.'): value for key, value in options.items()})
    return cfg


def build(kind, accelerator, work_dir, **options):
    install_card(accelerator)
    return RUNNERS.build(config(kind, accelerator, work_dir, **options))


def train(kind, accelerator, work_dir, devices=1, prepare=None, **options):
    """Train and tell what came of it.

    Returns:
        dict: ``weights``, ``devices`` that hold parameters, ``strategy`` and ``moved`` bytes.
    """
    if devices is not None and devices > 1:
        parallel = dict(dict(enable=True, devices=devices), **options.pop('parallel', {}))
        options['model_parallel'] = parallel
    runner = build(kind, accelerator, work_dir, **options)
    if prepare is not None:
        prepare(runner)
    runner.train()
    strategy = getattr(runner.placement, 'strategy', None)
    return dict(
        weights=trained_weights(runner),
        devices=sorted({str(tensor.device) for tensor in runner.model.parameters()}),
        strategy=None if strategy is None else strategy.kind,
        dtypes=sorted({(p.requires_grad, str(p.dtype)) for p in runner.model.parameters()}),
        iter=runner.iter,
        losses=[float(v) for v in runner.message_hub.log_scalars['train/loss'].data[0]],
    )
