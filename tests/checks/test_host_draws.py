"""Random numbers of a step on a device that are drawn on the host."""

import pytest
import torch
from torch.nn.functional import dropout

from mmdevplug.checks.host_draws import HostDraws
from mmdevplug.utils.torch_compat import DISPATCH_MODES

pytestmark = pytest.mark.skipif(not DISPATCH_MODES, reason='this PyTorch shows no operators')

X = torch.arange(12.0).view(3, 4).t()

DRAWS = {
    'rand': lambda dtype: torch.rand(5, dtype=dtype),
    'rand_like': lambda dtype: torch.rand_like(X.to(dtype)),
    'randint_like': lambda dtype: torch.randint_like(X.to(dtype), 0, 9),
    'normal_': lambda dtype: torch.empty(5, dtype=dtype).normal_(),
    'bernoulli': lambda dtype: torch.bernoulli(X.to(dtype) / 12),
    'randperm': lambda dtype: torch.randperm(9),
    'multinomial': lambda dtype: torch.multinomial(X.to(dtype), 2),
}


def drawn(draw, dtype):
    torch.manual_seed(3)
    return draw(dtype)


@pytest.mark.parametrize('name', DRAWS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_numbers_of_any_dtype_are_those_of_float32(name, dtype):
    expected = drawn(DRAWS[name], torch.float32)
    with HostDraws('cpu'):
        found = drawn(DRAWS[name], dtype)
    assert found.dtype == (dtype if expected.is_floating_point() else torch.int64)
    assert torch.equal(found, expected.to(found.dtype))
    assert found.stride() == expected.stride()


def test_a_tensor_is_filled_in_place():
    x = torch.zeros(4, 4)
    column = x[:, 1]
    with HostDraws('cpu'):
        assert column.uniform_(1, 2) is column
    assert torch.equal(x != 0, torch.arange(4).eq(1).expand(4, 4))


def test_dropout_passes_gradients_of_what_it_kept():
    x = torch.ones(100, requires_grad=True)
    with HostDraws('cpu'):
        found = dropout(x, 0.5)
        found.sum().backward()
    assert torch.equal(found, x.grad)
    assert set(found.tolist()) == {0.0, 2.0}


def test_a_generator_of_the_model_draws_itself():
    generator = torch.Generator().manual_seed(1)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1))
    with HostDraws('cpu'):
        assert torch.equal(torch.rand(3, generator=generator), expected)


def test_another_device_draws_itself():
    torch.manual_seed(3)
    with HostDraws('zeta'):
        found = torch.rand(3)
    assert torch.equal(found, drawn(lambda dtype: torch.rand(3), None))
