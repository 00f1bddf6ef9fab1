"""Sharded trainings of real models, whose losses and weights are compared with one process."""

import copy
import os
import threading
from collections import OrderedDict
from types import SimpleNamespace

import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from mmengine.structures import InstanceData
from torch import distributed as torch_dist, nn
from torch.utils.checkpoint import checkpoint

from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.sharding.states import is_sharded
from tests import parallel_jobs
from tests.jobs import install_card
from tests.parallel_jobs import MODELS_OF, SAMPLES, SpreadLlama, build, seeded
from tests.staged.test_collectives import add_streams

NORM = dict(type='SyncBN', requires_grad=True)


@MODELS.register_module()
class ShardedLlama(SpreadLlama):
    """transformers' Llama, of which peft trains adapters alone."""

    def __init__(self, **kwargs):
        from peft import LoraConfig, get_peft_model

        super().__init__(**kwargs)
        config = LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], init_lora_weights=False)
        self.llama = get_peft_model(self.llama, config)


class ShardedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


@MODELS.register_module()
class ShardedTwice(BaseModel):
    """Two forward passes in a step, tied weights, frozen ones, and an init_weights of its own."""

    def __init__(self, width=24, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.stem = nn.Linear(3 * 8 * 8, width)
        self.blocks = nn.ModuleList(ShardedBlock(width) for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.blocks[3].second.weight = self.blocks[2].second.weight
        self.head = nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def init_weights(self):
        nn.init.trunc_normal_(self.stem.weight, std=0.1)
        for block in self.blocks:
            nn.init.orthogonal_(block.first.weight)
        with torch.no_grad():
            self.head.weight[0] = torch.rand(self.head.in_features)
        self.blocks[0].first.bias.requires_grad_(False)

    def forward(self, inputs, labels, mode='tensor'):
        x = self.stem(inputs.flatten(1))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        logits = self.scale * self.head(x)
        if mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(logits, labels))
        return logits.argmax(1)

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, True)
            first = self._run_forward(data, mode='loss')['loss']
            data['inputs'] = data['inputs'].flip(-1)
            second = self._run_forward(data, mode='loss')['loss']
        loss, log = self.parse_losses(dict(loss=first + second))
        optim_wrapper.update_params(loss)
        return log


class ShardedView(nn.Module):
    """A block that returns an object with a view, and a lock."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.utils.weight_norm(nn.Linear(width, width))
        self.lock, self.given = threading.Lock(), []

    def forward(self, x):
        with self.lock:
            return SimpleNamespace(out=(x + self.linear(x).tanh()).unsqueeze(0).squeeze(0))


class ShardedViews(ShardedView):
    def forward(self, x):
        return super().forward(x).out


@MODELS.register_module()
class ShardedOwnWays(BaseModel):
    """Weights that the step writes to in four ways, tensors that are attributes, lists, a lock."""

    def __init__(self, width=16, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.stem = nn.Linear(3 * 8 * 8, width)
        self.blocks = nn.ModuleList([*(ShardedBlock(width) for _ in range(3))])
        self.views = nn.ModuleList([ShardedViews(width), ShardedViews(width)])
        self.hidden = nn.ModuleList([ShardedView(width), ShardedView(width)])
        self.head = nn.Linear(width, 4)
        self.teachers = nn.ModuleList(copy.deepcopy(self.head) for _ in range(4))
        self.teachers.requires_grad_(False)
        self.mask = (self.head.weight.detach() > 0).float() * 0.5
        self.masks = [self.mask, dict(noise=torch.randn(4))]
        self.held = [self.stem.weight, self.stem.bias]

    def init_weights(self):
        nn.init.trunc_normal_(self.stem.weight, std=0.1)
        self.late = self.stem.weight.detach()[:4].sum(1) / 100

    @torch.no_grad()
    def average(self):
        one, two, three, four = self.teachers
        one.weight.lerp_(self.head.weight, 0.1)
        two.weight.data.mul_(0.9).add_(self.head.weight.data, alpha=0.1)
        three.weight.data = three.weight.data * 0.9 + self.head.weight.data * 0.1
        four.bias.copy_(self.head.bias)
        nn.utils.vector_to_parameters(four.weight.flatten() * 0.5, [four.weight])

    def forward(self, inputs, labels, mode='tensor'):
        if mode == 'loss':
            self.average()
        x = self.stem(inputs.flatten(1))
        for block in self.blocks:
            x = block(x)
        for block in self.views:
            x = block(x)
            x += 0.1
        for block in self.hidden:
            x = block(x).out
            x *= 0.9
        assert self.held[0] is self.stem.weight or is_sharded(self.held[0])
        mask, (_, more) = self.mask.to(x.device), self.masks
        shift = more['noise'].to(x.device) + self.late.to(x.device)
        logits = nn.functional.linear(x, self.head.weight * mask, self.head.bias) + shift
        if mode != 'loss':
            return logits.argmax(1)
        far = sum((teacher(x) - logits).square().mean() for teacher in self.teachers)
        return dict(loss=nn.functional.cross_entropy(logits, labels) + far)


def scene_model(backbone, head):
    common = dict(
        channels=16,
        num_classes=4,
        dropout_ratio=0.0,
        norm_cfg=NORM,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    )
    return dict(
        parallel_jobs.segmentor(),
        backbone=backbone,
        decode_head=dict(head, **common),
        auxiliary_head=None,
    )


def segformer():
    backbone = dict(
        type='mmseg.MixVisionTransformer',
        embed_dims=8,
        num_stages=2,
        num_layers=[2, 2],
        num_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        sr_ratios=[2, 1],
        out_indices=(0, 1),
        drop_path_rate=0.0,
    )
    return scene_model(
        backbone, dict(type='mmseg.SegformerHead', in_channels=[8, 16], in_index=[0, 1])
    )


def vit():
    backbone = dict(
        type='mmseg.VisionTransformer',
        img_size=(16, 16),
        patch_size=4,
        embed_dims=16,
        num_layers=3,
        num_heads=2,
        out_indices=(2,),
        with_cp=True,
    )
    return scene_model(backbone, dict(type='mmseg.FCNHead', in_channels=16, num_convs=1))


def detr():
    attention = dict(embed_dims=32, num_heads=2, dropout=0.0, batch_first=True)
    ffn = dict(embed_dims=32, feedforward_channels=64, num_fcs=2, ffn_drop=0.0)
    layer = dict(self_attn_cfg=attention, ffn_cfg=ffn)
    costs = [
        dict(type='ClassificationCost', weight=1.0),
        dict(type='BBoxL1Cost', weight=5.0, box_format='xywh'),
        dict(type='IoUCost', iou_mode='giou', weight=2.0),
    ]
    return dict(
        type='mmdet.DETR',
        num_queries=8,
        data_preprocessor=dict(
            type='mmdet.DetDataPreprocessor', mean=[120.0] * 3, std=[60.0] * 3, pad_size_divisor=1
        ),
        backbone=dict(
            type='mmdet.ResNet',
            depth=18,
            base_channels=8,
            out_indices=(3,),
            frozen_stages=1,
            norm_cfg=dict(type='BN', requires_grad=False),
            norm_eval=True,
            style='pytorch',
        ),
        neck=dict(
            type='mmdet.ChannelMapper',
            in_channels=[64],
            kernel_size=1,
            out_channels=32,
            act_cfg=None,
            norm_cfg=None,
            num_outs=1,
        ),
        encoder=dict(num_layers=2, layer_cfg=layer),
        decoder=dict(
            num_layers=2, layer_cfg=dict(layer, cross_attn_cfg=attention), return_intermediate=True
        ),
        positional_encoding=dict(num_feats=16, normalize=True),
        bbox_head=dict(
            type='DETRHead',
            num_classes=3,
            embed_dims=32,
            loss_cls=dict(
                type='CrossEntropyLoss', bg_cls_weight=0.1, use_sigmoid=False, class_weight=1.0
            ),
            loss_bbox=dict(type='L1Loss', loss_weight=5.0),
            loss_iou=dict(type='GIoULoss', loss_weight=2.0),
        ),
        train_cfg=dict(assigner=dict(type='HungarianAssigner', match_costs=costs)),
        test_cfg=dict(max_per_img=8),
    )


@DATASETS.register_module()
class ShardedObjects(torch.utils.data.Dataset):
    """Images of 64 pixels with two boxes in each, as mmdet has them."""

    def __init__(self):
        self.inputs = torch.randint(0, 255, (SAMPLES, 3, 64, 64), generator=seeded(6))
        self.boxes = torch.rand(SAMPLES, 2, 4, generator=seeded(7)) * 24 + 4
        self.labels = torch.randint(0, 3, (SAMPLES, 2), generator=seeded(8))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        from mmdet.structures import DetDataSample

        boxes = self.boxes[index].clone()
        boxes[:, 2:] += boxes[:, :2]
        sample = DetDataSample(gt_instances=InstanceData(bboxes=boxes, labels=self.labels[index]))
        shape = dict(img_shape=(64, 64), ori_shape=(64, 64), batch_input_shape=(64, 64))
        sample.set_metainfo(dict(shape, scale_factor=(1.0, 1.0)))
        return dict(inputs=self.inputs[index].to(torch.uint8), data_samples=sample)


MODELS_OF.update(
    twice=(lambda: dict(type='ShardedTwice'), 'SpreadImages', 'default_collate'),
    own_ways=(lambda: dict(type='ShardedOwnWays'), 'SpreadImages', 'default_collate'),
    lora=(lambda: dict(type='ShardedLlama'), 'SpreadTokens', 'default_collate'),
    segformer=(segformer, 'SpreadScenes', 'pseudo_collate'),
    vit=(vit, 'SpreadScenes', 'pseudo_collate'),
    detr=(detr, 'ShardedObjects', 'pseudo_collate'),
)
SCOPES = dict(segformer='mmseg', vit='mmseg', detr='mmdet')


def losses_of(runner):
    """The mean loss of all ranks, by iteration."""
    losses = [float(value) for value in runner.message_hub.log_scalars['train/loss'].data[0]]
    if torch_dist.is_initialized():
        of_ranks = gather_json(losses)
        losses = [sum(values) / len(of_ranks) for values in zip(*of_ranks)]
    return losses


def whole(value):
    """A tensor of all ranks, on the host."""
    return getattr(value, 'full_tensor', lambda: value)().detach().cpu().clone()


def train(kind, accelerator, work_dir, **options):
    """Train; return losses, whole weights, norms of gradients, and what is held here."""
    streams, accelerator = accelerator == 'streams', accelerator.replace('streams', 'zeta')
    install_card(accelerator)
    if streams:
        add_streams()
    options.setdefault('default_scope', SCOPES.get(kind, 'mmengine'))
    runner = build(kind, accelerator, work_dir, **options)
    runner.train()
    model = getattr(runner.model, 'module', runner.model)
    averaged = [hook.ema_model.module for hook in runner.hooks if hasattr(hook, 'ema_model')]
    scalars = runner.message_hub.log_scalars
    norms = scalars['train/grad_norm'].data[0] if 'train/grad_norm' in scalars else []
    held = [getattr(p, 'to_local', lambda p=p: p)() for p in model.parameters()]
    states = [
        whole(value)
        for state in runner.optim_wrapper.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return dict(
        losses=losses_of(runner),
        weights=OrderedDict((name, whole(v)) for name, v in model.state_dict().items()),
        states=states,
        norms=[float(each) for each in norms],
        held=sum(p.numel() for p in held),
        all=sum(p.numel() for p in model.parameters()),
        active=not runner.placement.whole,
        averaged={name: whole(v) for each in averaged for name, v in each.state_dict().items()},
        devices=sorted({p.device.type for p in held}),
    )


def train_all(cases, accelerator, work_dir, sharded):
    """Train each of several cases, ``(kind, sharding, other options)``, in one job."""
    results = []
    for number, (kind, sharding, options) in enumerate(cases):
        folder = os.path.join(str(work_dir), f'{number}_{"many" if sharded else "one"}')
        more = dict(sharding=sharding) if sharded else {}
        results.append(train(kind, accelerator, folder, **options, **more))
    return results
