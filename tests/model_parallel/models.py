"""Small models of the architectures that plans are made for, without weights."""

import os
from contextlib import nullcontext

import mmdet
import mmseg
import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    ConvNextConfig,
    GPT2Config,
    LlamaConfig,
    SwinConfig,
    T5Config,
    ViTConfig,
)

from mmdevplug.model_parallel.meta_build import build_from_file, can_build_on_meta
from tests.jobs import torch_before

LLAMA = dict(
    vocab_size=500,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
)
T5 = dict(
    vocab_size=500,
    d_model=32,
    d_ff=64,
    d_kv=8,
    num_layers=3,
    num_heads=4,
    decoder_start_token_id=0,
    pad_token_id=0,
)
SWIN = dict(embed_dim=8, depths=[2, 2, 6, 2], num_heads=[1, 2, 4, 8], window_size=7)
VIT = dict(hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=64)


class Residual(nn.Module):
    """A block that needs its input and its weights on one device."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Patched(nn.Module):
    """Parameters and buffers of its own beside its children, and a child without either."""

    def __init__(self, width=16, depth=5):
        super().__init__()
        self.blocks = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.embed = nn.Linear(width, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, width))
        self.register_buffer('mean', torch.zeros(width), persistent=False)
        self.register_buffer('steps', torch.zeros((), dtype=torch.long))
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.embed(x - self.mean)], 1)
        x = self.dropout(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def openmmlab(package, name):
    """The model of a config that a package brings along."""
    folder = os.path.join(os.path.dirname(package.__file__), '.mim', 'configs')
    return build_from_file(os.path.join(folder, name))[0]


MODELS = {
    'llama': lambda: AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)),
    'gpt2': lambda: AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=500, n_embd=32, n_layer=6, n_head=4)
    ),
    't5': lambda: AutoModelForSeq2SeqLM.from_config(T5Config(**T5)),
    'vit': lambda: AutoModel.from_config(ViTConfig(**VIT)),
    'swin': lambda: AutoModel.from_config(SwinConfig(**SWIN)),
    'convnext': lambda: AutoModel.from_config(
        ConvNextConfig(depths=[2, 2, 6, 2], hidden_sizes=[8, 16, 32, 64])
    ),
    'mixtral': lambda: AutoModelForCausalLM.from_config(
        transformers.MixtralConfig(**LLAMA, num_local_experts=4)
    ),
    'mmseg': lambda: openmmlab(mmseg, 'upernet/upernet_r50_4xb2-40k_cityscapes-512x1024.py'),
    'mmseg swin': lambda: openmmlab(
        mmseg, 'swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py'
    ),
    'mmdet': lambda: openmmlab(mmdet, 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'),
    'detr': lambda: openmmlab(mmdet, 'detr/detr_r50_8xb2-150e_coco.py'),
    'generic': Patched,
}


OF_REPOSITORIES = ('mmseg', 'mmseg swin', 'mmdet', 'detr')


def every_model():
    """Their names, with the marks that tests of them need."""
    return [with_marks(name) for name in MODELS]


def with_marks(name, *values):
    """A case of a test: a model, with the marks that it needs, and other parameters."""
    marks = pytest.mark.operators if name in OF_REPOSITORIES else ()
    return pytest.param(name, *values, marks=marks)


def without_memory():
    """The meta device for whatever is built, where PyTorch can."""
    return torch.device('meta') if can_build_on_meta() else nullcontext()


def make(name):
    """Build one on the meta device, where PyTorch can and the model reads no values."""
    if name == 'mixtral' and not hasattr(transformers, 'MixtralConfig'):
        pytest.skip('needs transformers 4.36, which has Mixtral')
    try:
        with without_memory():
            return MODELS[name]()
    except NotImplementedError:
        if not torch_before('2.4.0'):
            raise
        return MODELS[name]()


def every_name(model):
    """All names of all parameters and buffers."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f'{prefix}.{name}'.lstrip('.'), tensor
