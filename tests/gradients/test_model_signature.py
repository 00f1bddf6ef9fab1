"""Ranks whose models differ are refused at the start, with the first difference."""

import pytest
import torch
from torch import nn

from mmdevplug.errors import ModelError
from tests.gradients.averaging import net, rank, wrap
from tests.jobs import start
from tests.ranks import in_ranks


def another_shape(module):
    return nn.Sequential(*module[:2], nn.Linear(8, 5))


def one_more(module):
    return nn.Sequential(*module, nn.Linear(4, 4, bias=False))


def another_dtype(module):
    return module.double()


def frozen(module):
    module[0].bias.requires_grad_(False)
    return module


def a_buffer(module):
    module.register_buffer('scale', torch.ones(3))
    return module


#: By change of the model on rank 1: what is said on all ranks.
MESSAGES = {
    another_shape: 'rank 1: has parameter 2.weight (5x8 torch.float32) where rank 0',
    one_more: 'has parameter 3.weight (4x4 torch.float32) where rank 0 has nothing more',
    another_dtype: '(8x8 torch.float64) where rank 0 has parameter 0.weight (8x8 torch.float32)',
    frozen: '0.bias (8 torch.float32, frozen) where rank 0 has parameter 0.bias (8 torch.',
    a_buffer: 'has buffer scale (3 torch.float32) where rank 0 has',
}


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@pytest.mark.parametrize('change', MESSAGES)
@in_ranks(3)
def test_the_first_difference_is_named_on_all_ranks(accelerator, change):
    start(accelerator)
    module = change(net()) if rank() == 1 else net()
    with pytest.raises(ModelError) as raised:
        wrap(module)
    assert MESSAGES[change] in str(raised.value)
    assert 'rank 2:' not in str(raised.value)
