"""What is kept whole, what goes together, and that nothing is left without a device."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import plan
from mmdevplug.model_parallel.unsplittable import WholeModules
from tests.jobs import need_peft
from tests.model_parallel.models import (
    LLAMA,
    Residual,
    every_model,
    every_name,
    make,
    with_marks,
    without_memory,
)


@pytest.fixture(params=every_model())
def model(request):
    return make(request.param)


def covering(device_map, name):
    """The entries that cover a name."""
    return [key for key in device_map if not key or name == key or name.startswith(f'{key}.')]


def test_every_tensor_has_a_device(model):
    for strategy in ('auto', 'balanced', 'dynamic'):
        for devices in ('xla:0', 'xla:0-2', 'xla:0-6'):
            made = plan(model, devices, strategy)
            device_of = {}
            for name, tensor in every_name(model):
                assert len(covering(made.device_map, name)) >= 1, (strategy, name)
                found = made.device_of(name)
                assert device_of.setdefault(id(tensor), found) == found, (strategy, name)


def test_accelerate_takes_the_map(model, recwarn):
    from accelerate.utils import check_device_map

    check_device_map(model, plan(model, 'xla:0-2').device_map)
    named = dict(every_name(model))
    known = dict(model.named_modules(remove_duplicate=False))
    assert all(key in known or key in named for key in plan(model, 'xla:0-2').device_map)


def test_entries_do_not_overlap(model):
    made = plan(model, 'xla:0-3')
    assert all(covering(made.device_map, name) == [name] for name in made.device_map)


@pytest.mark.parametrize(
    ('name', 'whole', 'split'),
    [
        with_marks('llama', {'LlamaDecoderLayer'}, {'LlamaModel'}),
        with_marks('gpt2', {'GPT2Block'}, {'GPT2Model'}),
        with_marks('t5', {'T5Block'}, {'T5Stack'}),
        with_marks('vit', {'ViTLayer', 'ViTEmbeddings'}, {'ViTModel'}),
        with_marks('swin', {'SwinLayer'}, {'SwinStage'}),
        with_marks('convnext', {'ConvNextLayer'}, {'ConvNextStage'}),
        with_marks('mixtral', {'MixtralDecoderLayer'}, {'MixtralModel'}),
        with_marks('mmseg', {'Bottleneck'}, {'ResNetV1c', 'ResLayer'}),
        with_marks('mmseg swin', {'SwinBlock'}, {'SwinBlockSequence', 'SwinTransformer'}),
        with_marks('mmdet', {'Bottleneck', 'ConvModule'}, {'ResNet', 'RPNHead'}),
        with_marks(
            'detr', {'DetrTransformerEncoderLayer', 'DetrTransformerDecoderLayer'}, {'DETR'}
        ),
        with_marks('generic', {'Residual'}, {'Patched'}),
    ],
)
def test_blocks_are_found(name, whole, split):
    model = make(name)
    found = WholeModules(model)
    kept = {
        type(module).__name__
        for pair in model.named_modules()
        for module in pair[1:]
        if pair in found
    }
    assert whole <= kept
    assert not split & kept


def test_blocks_are_never_split(model):
    whole = WholeModules(model)
    made = plan(model, 'xla:0-4')
    for name, module in model.named_modules():
        if (name, module) in whole:
            made.device_of(name)  # refuses what is on several devices


class Nested(nn.Module):
    """A class that repeats inside itself."""

    def __init__(self, depth=1):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.parts = nn.ModuleList([Nested(depth - 1) for _ in range(2)] if depth else ())


def test_a_class_that_is_nested_in_itself():
    made = plan(Nested(2), 'xla:0-3')
    assert made.device_of('parts.0.parts.1') is not None
    assert len({str(made.device_of(f'parts.{i}.parts.0')) for i in range(2)}) == 2


def test_the_users_list():
    model = make('generic')
    assert plan(model, 'xla:0-1', no_split='blocks').device_of('blocks') is not None
    with pytest.raises(PlacementError, match='is split over xla:0, xla:1'):
        plan(model, 'xla:0-1').device_of('blocks')
    with pytest.raises(PlacementError, match='5 blocks|1 blocks for 2 devices'):
        plan(model, 'xla:0-1', no_split=['Patched'])
    with pytest.raises(PlacementError, match="'Nothing', which is neither a class nor a module"):
        plan(model, 'xla:0-1', no_split=['Nothing'])


def test_own_tensors_go_with_the_first_block_beside_them():
    # Registered after the blocks, but they are used where the pass begins.
    made = plan(make('generic'), 'xla:0-2')
    for name in ('cls_token', 'pos_embed', 'mean', 'steps'):
        assert made.device_map[name] == 'xla:0'
        assert made.device_of('blocks.0') == made.device_of(name)


def test_modules_without_parameters_follow_the_block_before():
    made = plan(make('generic'), 'xla:0-2')
    assert made.device_of('dropout') == made.device_of('embed')


@pytest.mark.operators
def test_what_comes_before_the_first_block_goes_with_it():
    model = nn.Sequential(nn.BatchNorm1d(9, affine=False), nn.Linear(4, 4), nn.Linear(4, 4))
    assert plan(model, 'xla:0-1').device_map == {'0': 'xla:0', '1': 'xla:0', '2': 'xla:1'}
    assert plan(make('mmseg'), 'xla:0-1').device_map['data_preprocessor'] == 'xla:0'
    alone = nn.Sequential(nn.Dropout(), nn.Linear(4, 4), nn.BatchNorm1d(9, affine=False))
    assert plan(alone, 'xla:0').device_map == {'': 'xla:0'}


def test_ties_that_are_only_declared():
    from transformers import AutoModelForCausalLM, LlamaConfig

    with without_memory():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, tie_word_embeddings=True))
    # As after loading without tying.
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    made = plan(model, 'xla:0-2')
    assert made.device_of('lm_head') == made.device_of('model.embed_tokens')


class Declared(nn.Module):
    """Declares ties by a name and by a replacement, neither a regular expression."""

    config = SimpleNamespace(tie_word_embeddings=True)
    _tied_weights_keys = {'head(.weight': 'first.weight', r'last.(\w+)': r'first.\1'}

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.add_module('head(', nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)


def test_declared_names_that_are_no_regular_expressions():
    made = plan(Declared(), 'xla:0-1')
    assert made.device_of('head(') == made.device_of('first') != made.device_of('middle')


class Shared(nn.Module):
    """The same module and the same tensor under several names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Residual(8) for _ in range(4)])
        self.again = self.first
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight


def test_what_is_shared_stays_together_and_counts_once():
    model = Shared()
    made = plan(model, 'xla:0-2')
    devices = {made.device_of(name) for name in ('first', 'again', 'again.weight', 'last')}
    assert len(devices) == 1
    assert sum(made.loads.values()) == sum(4 * p.numel() for p in model.parameters())


@pytest.mark.parametrize('name', ['llama', 't5', 'generic'])
def test_adapters_sit_with_their_base(name):
    targets = {'llama': ['q_proj', 'down_proj'], 't5': ['q', 'wo'], 'generic': ['linear', 'head']}
    peft = need_peft()
    model = peft.get_peft_model(make(name), peft.LoraConfig(r=4, target_modules=targets[name]))
    made = plan(model, 'xla:0-2', training=True)
    adapters = [n for n, _ in model.named_parameters() if '.lora_' in n]
    assert adapters
    for adapter in adapters:
        layer = adapter[: adapter.index('.lora_')]
        assert made.device_of(adapter) == made.device_of(f'{layer}.base_layer.weight')


def test_an_adapted_layer_is_never_split():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    peft = need_peft()
    model = peft.get_peft_model(Bare(), peft.LoraConfig(r=4, target_modules=['one', 'two']))
    made = plan(model, 'xla:0-1')
    assert set(made.device_map) == {'base_model.model.one', 'base_model.model.two'}


def test_attention_that_reads_its_childrens_weights_is_kept_whole():
    model = nn.ModuleDict(dict(one=nn.MultiheadAttention(8, 2), two=nn.Linear(8, 8)))
    made = plan(model, 'xla:0-1')
    assert made.device_map == {'one': 'xla:0', 'two': 'xla:1'}
