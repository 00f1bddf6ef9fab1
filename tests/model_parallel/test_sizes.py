"""Bytes of modules, against accelerate, real optimizers and real passes."""

import pytest
import torch

from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import module_sizes
from tests.jobs import need_peft
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


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(dtype='float99'), "dtype='float99'"),
        (dict(dtype=3), 'dtype=3'),
        (dict(optimizer='magic'), "optimizer='magic'.*adamw"),
        (dict(optimizer=-1), 'optimizer=-1'),
    ],
)
def test_what_cannot_be_measured(options, words):
    with pytest.raises(PlacementError, match=words):
        module_sizes(Patched(), **options)
