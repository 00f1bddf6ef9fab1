"""Bytes of modules, against accelerate, real optimizers and real passes."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import module_sizes
from tests.jobs import need_peft, needs_meta_pass
from tests.model_parallel.models import LLAMA, Patched, make


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize('dtype', [None, 'bfloat16', torch.float16])
@pytest.mark.parametrize('name', ['llama', 'gpt2', 't5', 'generic'])
def test_weights_are_those_of_accelerate(name, dtype):
    from accelerate.utils.modeling import compute_module_sizes

    model = make(name)
    sizes = module_sizes(model, dtype=dtype)
    # accelerate counts a mask's elements as bits; PyTorch keeps a byte for each.
    masks = {n: b.numel() for n, b in model.named_buffers() if b.dtype is torch.bool}
    for module, size in compute_module_sizes(model, dtype=dtype).items():
        inside = f'{module}.' if module else ''
        flags = sum(masks[name] for name in masks if f'{name}.'.startswith(inside))
        assert sizes[module] == size + flags * 7 / 8, module


def test_a_shared_tensor_counts_once():
    model = make('gpt2')
    assert module_sizes(model)['lm_head'] == 0
    assert module_sizes(model)[''] == bytes_of({*model.parameters(), *model.buffers()})


@pytest.mark.parametrize(
    ('name', 'make_optimizer'),
    [
        ('adamw', lambda ps: torch.optim.AdamW(ps)),
        ('adam', lambda ps: torch.optim.Adam(ps)),
        ('sgd', lambda ps: torch.optim.SGD(ps, 0.1)),
        ('momentum', lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
        ('adagrad', lambda ps: torch.optim.Adagrad(ps)),
        ('rmsprop', lambda ps: torch.optim.RMSprop(ps)),
        (2, lambda ps: torch.optim.AdamW(ps)),
    ],
)
def test_training_keeps_what_is_counted(name, make_optimizer):
    model = Patched()
    model.embed.requires_grad_(False)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    model(torch.zeros(2, 8, 16)).sum().backward()
    optimizer.step()
    sizes = module_sizes(model, training=True, optimizer=name)
    state = [
        t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
    ]
    parts = sizes.parts()
    assert parts['gradients'] == bytes_of(p.grad for p in model.parameters() if p.grad is not None)
    assert parts['optimizer'] == bytes_of(tensor for tensor in state if tensor.numel() > 1)
    assert sizes.parts('embed')['gradients'] == 0
    assert module_sizes(model).parts()['gradients'] == 0


def test_adapters_alone_are_trained():
    peft = need_peft()
    model = peft.get_peft_model(make('llama'), peft.LoraConfig(r=4, target_modules=['q_proj']))
    trained = bytes_of(p for n, p in model.named_parameters() if 'lora_' in n)
    sizes = module_sizes(model, training=True)
    assert sizes.parts()['gradients'] == trained
    assert sizes.parts()['optimizer'] == 2 * trained
    layer = 'base_model.model.model.layers.3'
    assert sizes.parts(layer)['gradients'] == trained // LLAMA['num_hidden_layers']


def kept_for_backward(model, inputs):
    """Bytes that a real pass keeps, without the weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(*inputs)
    assert result is not None
    return sum(s.nbytes() for address, s in kept.items() if address not in weights)


@needs_meta_pass
def test_activations_are_those_of_a_real_pass():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 4)
    )
    inputs = (torch.randn(5, 8),)
    sizes = module_sizes(model, training=True, sample_inputs=inputs)
    assert sizes.activations[''] == kept_for_backward(model, inputs)
    assert sizes.activations['2'] == sum(sizes.activations.get(f'2.{i}', 0) for i in range(2))
    assert module_sizes(model, sample_inputs=inputs).activations.get('', 0) == 0


@needs_meta_pass
def test_a_pass_leaves_the_model_as_it_is():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    before = {
        name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()
    }
    ids = torch.zeros(2, 7, dtype=torch.long)
    sizes = module_sizes(model, training=True, sample_inputs=dict(input_ids=ids, labels=ids))
    layers = [sizes.activations[f'model.layers.{i}'] for i in range(6)]
    # The first also keeps the position embeddings that all share.
    assert layers[0] > layers[1] > 0
    assert len(set(layers[1:])) == 1
    for name, tensor in model.named_parameters():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
    assert not any(hooks)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(dtype='float99'), "dtype='float99'"),
        (dict(dtype=3), 'dtype=3'),
        (dict(optimizer='magic'), "optimizer='magic'.*adamw"),
        (dict(optimizer=-1), 'optimizer=-1'),
        pytest.param(
            dict(sample_inputs=torch.zeros(1, 3, 5)),
            'Patched on the meta device fails',
            marks=needs_meta_pass,
        ),
    ],
)
def test_what_cannot_be_measured(options, words):
    with pytest.raises(PlacementError, match=words):
        module_sizes(Patched(), **options)
