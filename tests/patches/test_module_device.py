"""Models of repositories that ask a function where to make noise."""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner.amp import autocast
from torch import nn

from mmdevplug import init_device
from mmdevplug.model.place_model import place_model
from mmdevplug.patches.mmengine import patch_mmengine, restore_mmengine
from tests.columns import XLA
from tests.jobs import install_card
from tests.ranks import in_ranks

OWNER = 'mmagic.models.utils.model_utils'


def get_module_device(module):
    """As mmagic, mmgen and mmrazor have it."""
    try:
        next(module.parameters())
    except StopIteration:
        raise ValueError('The input module should contain parameters.') from None
    if next(module.parameters()).is_cuda:
        return next(module.parameters()).get_device()
    return torch.device('cpu')


class Generator(BaseModel):
    """Makes its noise where ``get_module_device`` of this module says."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, mode='tensor'):
        return self.net(torch.ones(2, 4, device=get_module_device(self)))


@pytest.mark.parametrize('accelerator', ['zeta', XLA])
@in_ranks()
def test_noise_is_made_on_the_device_of_the_module(accelerator):
    install_card(accelerator)
    owner = sys.modules[OWNER] = ModuleType(OWNER)
    owner.get_module_device = original = get_module_device
    context = init_device('none', accelerator)
    for _ in range(2):
        image = place_model(Generator(), context)()
    assert image.device == context.device
    with pytest.raises(ValueError, match='parameters'):
        owner.get_module_device(nn.ReLU())
    replaced = owner.get_module_device
    restore_mmengine()
    assert owner.get_module_device is original is not replaced


#: Where CUDA is there, it stays as it is.
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason='CUDA is there')
each = pytest.mark.parametrize('accelerator', ['cpu', 'zeta', XLA])


@without_cuda
@each
@in_ranks()
def test_a_call_of_cuda_moves_to_the_device_of_this_process(accelerator):
    """Models, losses and metrics that call ``.cuda()``, as some of mmagic and mmrotate do."""
    install_card(accelerator)
    patch_mmengine(accelerator)
    here = torch.ones(2).to(accelerator)
    device = here.device
    assert torch.zeros(2).cuda().device == nn.Linear(2, 2).cuda().weight.device == device
    assert torch.zeros(2, dtype=torch.int).type(torch.cuda.FloatTensor).add(here).device == device
    mask = torch.ones(2)
    if here.is_cuda:
        mask = mask.cuda()
    assert (here * mask).device == device
    assert not torch.ones(2).is_cuda
    assert not has_kernel(here)
    restore_mmengine()
    assert not here.is_cuda
    assert not {'cuda', 'is_cuda', 'type'} & set(vars(torch.Tensor))


def has_kernel(tensor):
    return tensor.is_cuda and torch.cuda.is_available()


def dtype_of(layer, inputs):
    return layer(inputs).dtype


def decorate():
    """Decorate a function as models do, with names that they imported: mmdet3d with MMEngine's."""
    return [
        torch.cuda.amp.autocast(enabled=False)(dtype_of),
        torch.autocast('cuda', enabled=False)(dtype_of),
        torch.autocast('cuda', dtype=torch.float32)(dtype_of),  # of BEVFusion
        autocast(enabled=False)(dtype_of),
        autocast(device_type='cuda', enabled=False)(dtype_of),
    ]


class InFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, layer):
        ctx.dtype = inputs.dtype, dtype_of(layer, inputs)
        return inputs.clone()


if hasattr(torch, 'get_autocast_dtype'):
    InFloat32.forward = torch.cuda.amp.custom_fwd(InFloat32.forward, cast_inputs=torch.float32)


@without_cuda
@each
@in_ranks()
def test_autocast_of_cuda_is_that_of_the_device(accelerator):
    """What dtypes a model computes in that turns mixed precision off and on by CUDA's names."""
    install_card(accelerator)
    before = decorate()
    patch_mmengine(accelerator)
    layer = nn.Linear(2, 2).to(accelerator)
    inputs = torch.ones(2, 2).to(accelerator)
    found = []
    with autocast(dtype=torch.bfloat16):
        found.append(layer(inputs).dtype)
        for context in (torch.cuda.amp.autocast, partial(torch.autocast, 'cuda')):
            with context(enabled=False):
                found.append(layer(inputs).dtype)
                with context():
                    found.append(layer(inputs).dtype)
        found.append(layer(inputs).dtype)
        wide = {function(layer, inputs) for function in before + decorate()}
        if hasattr(torch, 'get_autocast_dtype'):
            with torch.autocast('cuda', dtype=torch.float32):  # which casts what it gets
                wide.add(dtype_of(layer, inputs.to(torch.bfloat16)))
            seen = InFloat32.apply(inputs.to(torch.bfloat16).requires_grad_(), layer)
            wide.update(seen.grad_fn.dtype)
        assert wide == {torch.float32}, wide
        assert layer(inputs).dtype == torch.bfloat16
    restore_mmengine()
    assert torch.autocast.__init__.__code__.co_filename.endswith('autocast_mode.py')
    assert torch.autocast.__enter__.__code__.co_filename.endswith('autocast_mode.py')
    assert found[::5] == [torch.bfloat16] * 2
    assert found[1:5:2] == [torch.float32] * 2
    if accelerator != 'cpu':  # where PyTorch says that there is no CUDA
        assert found[2] != torch.float32
