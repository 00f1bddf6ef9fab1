"""The models that ``placement.py`` plans for, built from their configs, without weights."""

import os
from typing import Any, Callable, Dict

import torch
from torch import nn

from mmdevplug.model_parallel.meta_build import build_from_file

SEGMENTATION = 'segformer/segformer_mit-b5_8xb2-160k_ade20k-512x512.py'
DETECTION = 'cascade_rcnn/cascade-mask-rcnn_x101-64x4d_fpn_1x_coco.py'


def _transformers(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        with torch.device('meta'):
            return getattr(transformers, kind).from_config(
                getattr(transformers, config)(**options)
            )

    return build


def _openmmlab(package: str, config: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        folder = os.path.dirname(__import__(package).__file__ or '')
        return build_from_file(os.path.join(folder, '.mim', 'configs', config))[0]

    return build


MODELS: Dict[str, Callable[[], nn.Module]] = {
    'Llama-3.1-8B': _transformers(
        'AutoModelForCausalLM',
        'LlamaConfig',
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    'GPT-2 XL': _transformers(
        'AutoModelForCausalLM', 'GPT2Config', n_embd=1600, n_layer=48, n_head=25
    ),
    'T5-3B': _transformers(
        'AutoModelForSeq2SeqLM',
        'T5Config',
        d_model=1024,
        d_ff=16384,
        d_kv=128,
        num_layers=24,
        num_heads=32,
    ),
    'ViT-L': _transformers(
        'AutoModel',
        'ViTConfig',
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    'Swin-L': _transformers(
        'AutoModel',
        'SwinConfig',
        embed_dim=192,
        depths=[2, 2, 18, 2],
        num_heads=[6, 12, 24, 48],
        window_size=12,
        image_size=384,
    ),
    'Mixtral 8x7B': _transformers('AutoModelForCausalLM', 'MixtralConfig'),
    'ConvNeXt-XL': _transformers(
        'AutoModel', 'ConvNextConfig', depths=[3, 3, 27, 3], hidden_sizes=[256, 512, 1024, 2048]
    ),
    'SegFormer-B5 (mmseg)': _openmmlab('mmseg', SEGMENTATION),
    'Cascade Mask R-CNN (mmdet)': _openmmlab('mmdet', DETECTION),
}


class Residual(nn.Module):
    """A block of which a deep chain is made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


def chain(count: int) -> nn.Module:
    """So many blocks, of eight widths."""
    with torch.device('meta'):
        return nn.Sequential(*(Residual(64 * (1 + place * 7 % 8)) for place in range(count)))
