"""NaN and infinite gradients: found, named, and answered by all ranks alike."""

from functools import partial

import numpy as np
import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from torch import nn

from mmdevplug.distributed.nonfinite import names_of_nonfinite, scale_and_check
from mmdevplug.errors import ModelError
from mmdevplug.optim import DeviceAmpOptimWrapper
from tests.columns import CUDA, NATIVE, XLA, job_of
from tests.gradients.averaging import batch, gradients, net, rank, wrap
from tests.jobs import largest_difference, needs_scaler, start, weights_of
from tests.ranks import RanksFailed, errors_of_ranks, in_ranks, run_ranks

devices = pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
every_device = pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE, CUDA, XLA])


def spoil(module, value):
    """Let this rank's gradient of one weight be NaN or infinite."""

    def replace(gradient):
        gradient = gradient.clone()
        gradient[1, 2] = value
        return gradient

    return module.weight.register_hook(replace)


def train(accelerator, policy, bad_step=2, steps=5, value=float('nan'), **options):
    """Train with a bad gradient on rank 1."""
    context = start(accelerator)
    wrapper = wrap(net(), nonfinite_grads=policy, **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(steps):
        bad = step == bad_step
        handle = spoil(wrapper.module[2], value) if bad and rank() == 1 else None
        optimizer.zero_grad()
        wrapper(batch(step, context.device)).square().mean().backward()
        if handle is not None:
            handle.remove()
        optimizer.step()


@every_device
@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_stop_names_rank_and_parameter_on_all_ranks(accelerator, value):
    job = dict(job_of(accelerator), together=True)
    errors = errors_of_ranks(train, 2, accelerator, 'stop', 2, 5, value, **job)
    assert sorted(errors) == [0, 1]
    count = '1 NaN, 0 Inf of 32' if value != value else '0 NaN, 1 Inf of 32'
    for kind, message in errors.values():
        assert kind == 'ModelError'
        assert f'rank 1: 2.weight ({count})' in message
        assert 'rank 0' not in message
        assert "nonfinite_grads='ignore'" in message


@devices
def test_stop_is_the_default_where_gradients_pass_through_the_host(accelerator):
    with pytest.raises(RanksFailed, match='rank 1: 2.weight'):
        run_ranks(train, 2, accelerator, None)


@devices
def test_bad_gradients_are_named_when_they_are_compressed_too(accelerator):
    with pytest.raises(RanksFailed, match=r'rank 1: 2.weight \(1 NaN, 0 Inf of 32\)'):
        run_ranks(partial(train, grad_compression='bf16'), 2, accelerator, 'stop')


@every_device
@in_ranks(2)
def test_ignore_leaves_everything_as_it_is(accelerator):
    context = start(accelerator)
    wrapper = wrap(net(), nonfinite_grads='ignore')
    if rank() == 1:
        spoil(wrapper.module[2], float('nan'))
    wrapper(batch(0, context.device)).square().mean().backward()
    found = {name: int(np.isnan(value).sum()) for name, value in gradients(wrapper).items()}
    assert found == {'0.weight': 0, '0.bias': 0, '2.weight': 1, '2.bias': 0}


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        return dict(loss=self.layer(inputs).sum())


@needs_scaler
@in_ranks(2)
def test_a_gradient_scaler_skips_by_itself():
    start('cpu')
    wrapper = wrap(Model(), nonfinite_grads='stop')
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    optim_wrapper = DeviceAmpOptimWrapper(
        optimizer=optimizer, dtype='float16', loss_scale=dict(init_scale=2.0**15)
    )
    assert isinstance(optim_wrapper, AmpOptimWrapper)
    before = weights_of(wrapper.module)
    if rank() == 1:
        wrapper.module.layer.weight.register_hook(lambda gradient: gradient * float('inf'))
    wrapper.train_step(dict(inputs=torch.ones(3, 4)), optim_wrapper)
    assert largest_difference(before, weights_of(wrapper.module)) == 0
    assert optim_wrapper.loss_scaler.get_scale() == 2.0**14
    # Also if another optimizer of the model has none.
    wrapper.follow_scaler(OptimWrapperDict(scaled=optim_wrapper, plain=OptimWrapper(optimizer)))
    assert wrapper.policy.suspended


def test_an_unknown_policy_is_refused():
    with pytest.raises(RanksFailed, match=r"nonfinite_grads='halt'.*'stop' or 'ignore'"):
        run_ranks(train, 2, 'cpu', 'halt')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_values_are_scaled_and_checked(dtype):
    values = torch.arange(1000, dtype=torch.float32).to(dtype)
    expected = values * 0.5
    assert not scale_and_check(values, 0.5)
    assert torch.equal(values, expected)
    for bad in (float('nan'), float('inf'), -float('inf')):
        values[777] = bad
        assert scale_and_check(values, 1.0)
        values[777] = 0


def test_large_values_are_finite():
    values = torch.full((1000,), 3e38)
    assert not scale_and_check(values, 1.0)
    assert not scale_and_check(values.double() * 1e269, 1.0)


def test_names_tell_how_many():
    bad = torch.tensor([1.0, float('nan'), float('inf')])
    found = names_of_nonfinite([('good', torch.ones(2)), ('none', None), ('bad', bad)])
    assert found == ['bad (1 NaN, 1 Inf of 3)']
    assert issubclass(ModelError, RuntimeError)
