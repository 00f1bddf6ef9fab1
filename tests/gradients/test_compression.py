"""Half the bytes on the wire, and what that costs in accuracy."""

import pytest
import torch
from torch import nn

from mmdevplug.distributed.nonfinite import FinitePolicy
from mmdevplug.errors import DevPlugError, ModelError
from mmdevplug.gradients.own_step import average_gradients
from mmdevplug.gradients.wrapper_arguments import check_compressible
from mmdevplug.staged import reductions
from tests.columns import job_of
from tests.gradients.averaging import batch, gradients, net, rank, wrap
from tests.jobs import largest_difference, start
from tests.ranks import in_ranks, run_ranks

#: Half an interval between two values of bfloat16, relative to the value.
ROUNDING = 2.0**-9


def averages(accelerator, compression):
    """The averaged gradients, and the dtypes of what was averaged."""
    context = start(accelerator)
    wrapper = wrap(net(64), grad_compression=compression)
    wrapper(batch(0, context.device, 64)).square().mean().backward()
    return gradients(wrapper)


JOBS = [('cpu', 2), ('cpu', 3), ('zeta', 2), ('zeta', 3)]
JOBS += [pytest.param('xla', 2, marks=pytest.mark.xla)]


@pytest.mark.parametrize(('accelerator', 'ranks'), JOBS)
def test_bfloat16_rounds(accelerator, ranks):
    exact, rounded = (
        run_ranks(averages, ranks, accelerator, kind, **job_of(accelerator, ranks))
        for kind in ('none', 'bf16')
    )
    for expected, found in zip(exact, rounded):
        assert largest_difference(found, rounded[0]) == 0
        # Each rank's addend is rounded, then the average; addends may cancel.
        largest = max(abs(value).max() for value in expected.values())
        assert 0 < largest_difference(expected, found) <= 4 * ROUNDING * largest


@in_ranks(4)
def test_ranks_of_a_host_add_up_halves_in_float32():
    """What DDP and the staging of lazy devices make of 256 + 1 + 1 + 1, which is 256 in half."""
    start('cpu')
    reductions.LEAST_BYTES = 0
    wrapper = wrap(nn.Linear(10, 1, bias=False), grad_compression='bf16')
    wrapper(torch.full((1, 10), 1024.0 if rank() == 0 else 4.0)).sum().backward()
    assert (gradients(wrapper)['weight'] == 260).all()  # 259 in bfloat16, which keeps 8 bits


@in_ranks(2)
def test_models_with_a_step_of_their_own_add_up_halves_in_float32():
    start('cpu')
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    weight.grad = torch.full_like(weight, 60000.0)  # the sum is infinite in half
    average_gradients([('weight', weight)], None, FinitePolicy(True))
    assert (weight.grad == 60000).all()


@pytest.mark.parametrize('dtype', [torch.complex64, torch.complex128])
def test_complex_numbers_are_refused(dtype):
    model = nn.ParameterDict(
        dict(good=nn.Parameter(torch.ones(2)), count=nn.Parameter(torch.ones(2, dtype=dtype)))
    )
    with pytest.raises(ModelError, match=f"'bf16' compresses real .* of count is {dtype}"):
        check_compressible(model)


@pytest.mark.parametrize('value', ['fp16', 'powersgd', dict(type='powersgd')])
@in_ranks(2)
def test_other_compressions_are_refused_on_all_ranks(value):
    start('cpu')
    expected = f"grad_compression={value!r}: expected 'none' or 'bf16'"
    with pytest.raises(DevPlugError, match=expected):
        wrap(net(), grad_compression=value)
