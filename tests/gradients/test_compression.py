"""Fewer bytes on the wire, and what they cost in accuracy."""

import numpy as np
import pytest
import torch
from torch import nn

from mmdevplug.config.model_wrapper import GradCompression
from mmdevplug.distributed.traffic import TRAFFIC, all_reduce_bytes
from mmdevplug.errors import ModelError
from mmdevplug.gradients.compression import PowerSGD, make_compression
from tests.gradients.averaging import batch, gradients, net, rank, start, weights, wrap
from tests.jobs import largest_difference
from tests.ranks import RanksFailed, run_ranks

#: Half an interval between two values, relative to the value.
ROUNDING = dict(bf16=2.0**-9, fp16=2.0**-12)
devices = pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])


def averages(accelerator, **options):
    """The averaged gradients and what this rank sent for them."""
    context = start(accelerator)
    wrapper = wrap(net(64), hierarchy=False, **options)
    TRAFFIC.take()
    wrapper(batch(0, context.device, 64)).square().mean().backward()
    return gradients(wrapper), TRAFFIC.take()['gradients'].sent


def compressed(accelerator, kind):
    return averages(accelerator, grad_compression=kind)


@devices
@pytest.mark.parametrize('kind', ['bf16', 'fp16'])
@pytest.mark.parametrize('ranks', [2, 3])
def test_half_precision_rounds_and_sends_half(accelerator, kind, ranks):
    exact = run_ranks(averages, ranks, accelerator)
    rounded = run_ranks(compressed, ranks, accelerator, kind)
    size = sum(value.size for value in exact[0][0].values())
    assert exact[0][1] == pytest.approx(all_reduce_bytes(4 * size, ranks))
    for (expected, _), (found, sent) in zip(exact, rounded):
        assert largest_difference(found, rounded[0][0]) == 0
        # Each rank's addend is rounded, then the average; addends may cancel.
        largest = max(abs(value).max() for value in expected.values())
        assert 0 < largest_difference(expected, found) <= 4 * ROUNDING[kind] * largest
        assert sent == pytest.approx(all_reduce_bytes(2 * size, ranks), rel=0.01)


def add_up_many(kind):
    """What DDP and the staging of lazy devices make of 256 + 1 + 1 + 1, which is 256 in half."""
    start('cpu')
    from mmdevplug.staged import large_sums

    large_sums.LEAST_BYTES = 0
    wrapper = wrap(nn.Linear(10, 1, bias=False), grad_compression=kind)
    wrapper(torch.full((1, 10), 1024.0 if rank() == 0 else 4.0)).sum().backward()
    return gradients(wrapper)['weight']


@pytest.mark.parametrize(('kind', 'expected'), [('fp16', 259), ('bf16', 260)])
def test_ranks_of_a_host_add_up_halves_in_float32(kind, expected):
    for found in run_ranks(add_up_many, 4, kind):
        assert (found == expected).all()  # 259 in bfloat16, which keeps 8 bits


def power_sgd(accelerator, steps):
    context = start(accelerator)
    options = dict(type='powersgd', start_powerSGD_iter=2, matrix_approximation_rank=1)
    wrapper = wrap(
        nn.Linear(64, 32), grad_compression=dict(options, min_compression_rate=1), hierarchy=False
    )
    found, sent = [], []
    for _ in range(steps):
        TRAFFIC.take()
        wrapper.zero_grad(set_to_none=True)  # what was found before stays
        # One sample: the gradient is a product of two vectors on each rank, of rank 2 in all.
        wrapper(batch(0, context.device, 64)[:1]).sum().backward()
        found.append(gradients(wrapper))
        sent.append(TRAFFIC.take()['gradients'].sent)
    return found, sent


@devices
def test_powersgd_sends_thin_factors_and_makes_up_for_errors(accelerator):
    ranks = run_ranks(power_sgd, 2, accelerator, 40)
    for found, sent in ranks:
        assert largest_difference(found[-1], ranks[0][0][-1]) == 0
        exact = found[0]
        assert sent[0] == all_reduce_bytes(4 * (64 * 32 + 32), 2)
        assert sent[-1] == all_reduce_bytes(4 * (64 + 32 + 32), 2)
        # Error feedback: what is lost in one iteration comes in the next, so means agree.
        mean = np.mean([gradients_['weight'] for gradients_ in found[2:]], axis=0)
        assert np.abs(mean - exact['weight']).max() <= 0.1 * np.abs(exact['weight']).max()
        assert np.abs(found[-1]['bias'] - exact['bias']).max() <= 1e-6


def scalars_too(accelerator):
    context = start(accelerator)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(32, 32)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, inputs):
            return self.layer(inputs) * self.scale

    wrapper = wrap(Scaled(), grad_compression=dict(type='powersgd', start_powerSGD_iter=2))
    for step in range(4):
        wrapper(batch(step, context.device, 32)).square().mean().backward()
    return weights(wrapper), gradients(wrapper)['scale'].item()


@devices
def test_powersgd_takes_parameters_without_dimensions(accelerator):
    (_, one), (_, other) = run_ranks(scalars_too, 2, accelerator)
    assert one == other
    assert np.isfinite(one)


def test_integers_and_complex_numbers_are_refused():
    for dtype in (torch.int64, torch.complex64):
        named = [('good', torch.ones(2)), ('count', torch.ones(2, dtype=dtype))]
        with pytest.raises(ModelError, match=f"'bf16' compresses real .* of count is {dtype}"):
            make_compression(GradCompression('bf16', {}), named)
        assert make_compression(GradCompression('none', {}), named) is None


def test_options_of_powersgd_are_checked_at_once():
    assert isinstance(make_compression(GradCompression('powersgd', {}), []), PowerSGD)
    with pytest.raises(TypeError, match='matrix_rank'):
        make_compression(GradCompression('powersgd', dict(matrix_rank=2)), [])


def wrap_with(value):
    start('cpu')
    wrap(net(), grad_compression=value)


def test_a_wrong_value_is_refused_on_all_ranks():
    with pytest.raises(RanksFailed) as raised:
        run_ranks(wrap_with, 2, 'int8', together=True)
    assert sorted(raised.value.errors) == [0, 1]
    assert all("grad_compression='int8'" in error[1] for error in raised.value.errors.values())
