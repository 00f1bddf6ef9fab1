"""Half the bytes on the wire, and what that costs in accuracy."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdevplug.errors import ModelError
from mmdevplug.gradients.wrapper_arguments import check_compressible
from mmdevplug.staged import reductions
from tests.gradients.averaging import batch, gradients, net, rank, wrap
from tests.jobs import largest_difference, start
from tests.ranks import errors_of_ranks, run_ranks

#: Half an interval between two values of bfloat16, relative to the value.
ROUNDING = 2.0**-9


def averages(accelerator, compression):
    """The averaged gradients, and the dtypes of what was averaged."""
    context = start(accelerator)
    wrapper = wrap(net(64), grad_compression=compression)
    wrapper(batch(0, context.device, 64)).square().mean().backward()
    return gradients(wrapper)


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@pytest.mark.parametrize('ranks', [2, 3])
def test_bfloat16_rounds(accelerator, ranks):
    exact = run_ranks(averages, ranks, accelerator, 'none')
    check_rounded(exact, run_ranks(averages, ranks, accelerator, 'bf16'))


def check_rounded(exact, rounded):
    for expected, found in zip(exact, rounded):
        assert largest_difference(found, rounded[0]) == 0
        # Each rank's addend is rounded, then the average; addends may cancel.
        largest = max(abs(value).max() for value in expected.values())
        assert 0 < largest_difference(expected, found) <= 4 * ROUNDING * largest


def add_up_many():
    """What DDP and the staging of lazy devices make of 256 + 1 + 1 + 1, which is 256 in half."""
    start('cpu')
    reductions.LEAST_BYTES = 0
    wrapper = wrap(nn.Linear(10, 1, bias=False), grad_compression='bf16')
    wrapper(torch.full((1, 10), 1024.0 if rank() == 0 else 4.0)).sum().backward()
    return gradients(wrapper)['weight']


def test_ranks_of_a_host_add_up_halves_in_float32():
    for found in run_ranks(add_up_many, 4):
        assert (found == 260).all()  # 259 in bfloat16, which keeps 8 bits


def test_integers_and_complex_numbers_are_refused():
    for dtype in (torch.complex64, torch.complex128):
        named = [('good', torch.ones(2)), ('count', torch.ones(2, dtype=dtype))]
        for _, tensor in named:
            tensor.requires_grad = True
        model = SimpleNamespace(named_parameters=lambda named=named: named)
        with pytest.raises(ModelError, match=f"'bf16' compresses real .* of count is {dtype}"):
            check_compressible(model)


def wrap_with(value):
    start('cpu')
    wrap(net(), grad_compression=value)


@pytest.mark.parametrize('value', ['fp16', 'powersgd', dict(type='powersgd')])
def test_other_compressions_are_refused_on_all_ranks(value):
    errors = errors_of_ranks(wrap_with, 2, value, together=True)
    assert sorted(errors) == [0, 1]
    for _, message in errors.values():
        assert f"grad_compression={value!r}: expected 'none' or 'bf16'" in message
