"""The wrapper that trains each child by itself: its interface, and models it refuses."""

import pytest
import torch
from mmengine.model import MMSeparateDistributedDataParallel, is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner.checkpoint import get_state_dict
from torch import distributed as torch_dist, nn

from mmdevplug import DeviceDistributedDataParallel
from mmdevplug.errors import ModelError
from mmdevplug.gradients import DeviceSeparateDistributedDataParallel
from mmdevplug.model.place_model import wrapper_config
from mmdevplug.staged.staged_group import StagedProcessGroup
from tests.columns import CUDA, NATIVE, job_of, staged
from tests.features.parts import TinyGAN, set_requires_grad
from tests.jobs import start
from tests.ranks import in_ranks, run_ranks

each = pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE, CUDA])


def wrapped_gan(**options):
    model = TinyGAN()
    model.register_buffer('own', torch.zeros(2))
    return DeviceSeparateDistributedDataParallel(model, **options), model


@each
@in_ranks(2)
def test_children_are_wrapped(accelerator):
    device = start(accelerator).device
    wrapper, model = wrapped_gan(detect_anomalous_params=True)
    wrapper.train()
    assert isinstance(wrapper, MMSeparateDistributedDataParallel)
    assert is_model_wrapper(wrapper)
    wrapped = [name for name, child in model.named_children() if is_model_wrapper(child)]
    assert wrapped == ['generator', 'discriminator']
    assert all(isinstance(part, DeviceDistributedDataParallel) for part in wrapper.parts)
    assert all(part.detect_anomalous_params for part in wrapper.parts)
    assert {tensor.device for tensor in wrapper.state_dict().values()} == {device}
    assert model.data_preprocessor.device == device
    assert set(get_state_dict(model)) - set(TinyGAN().state_dict()) == {'own'}
    assert model.generator.module.training
    assert not wrapper.eval().module.generator.module.training
    assert (wrapper.staging is not None) == staged(accelerator)


def accumulate(accelerator):
    context = start(accelerator)
    wrapper, model = wrapped_gan()
    rank = torch_dist.get_rank()

    def backward():
        for part, size in ((model.generator, 8), (model.discriminator, 64)):
            part(torch.full((2, size), float(rank + 1)).to(context.device)).sum().backward()
        return [part.module[0].weight.grad.cpu().clone().numpy() for part in wrapper.parts]

    with wrapper.no_sync():
        assert [part.require_backward_grad_sync for part in wrapper.parts] == [False, False]
        own = backward()
    assert [part.require_backward_grad_sync for part in wrapper.parts] == [True, True]
    for parameter in wrapper.parameters():
        parameter.grad = None
    return list(zip(own, backward()))


@each
def test_no_sync_covers_all_children(accelerator):
    one, other = run_ranks(accumulate, 2, accelerator, **job_of(accelerator))
    for (own_of_one, averaged), (own_of_other, averaged_of_other) in zip(one, other):
        assert abs(own_of_one - own_of_other).max() > 0
        mean = (own_of_one + own_of_other) / 2
        assert abs(averaged - mean).max() <= 1e-5 * abs(mean).max()
        assert (averaged == averaged_of_other).all()


@in_ranks(2)
def test_stock_no_sync_fails():
    start('cpu')
    # What ours replaces: two children make the stock context yield twice.
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="generator didn't stop"):
        with MMSeparateDistributedDataParallel(model).no_sync():
            pass


@in_ranks(2)
def test_a_frozen_part_sends_nothing():
    """Buckets of a backward without and with a part that is frozen for the moment."""
    context = start('zeta')
    _, model = wrapped_gan(broadcast_buffers=True)
    set_requires_grad(model.discriminator, False)
    latent = torch.randn(4, 8).to(context.device)
    averaged, average = [], StagedProcessGroup.average

    def count(*args, **options):
        averaged.append(1)
        return average(*args, **options)

    StagedProcessGroup.average = count
    model.generator(latent).sum().backward()
    without = len(averaged)
    model.discriminator(model.generator(latent)).sum().backward()
    assert len(averaged) - without == without > 0


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.part = nn.Linear(2, 2)


@in_ranks(2)
def test_models_that_are_refused():
    start('zeta')
    with pytest.raises(ModelError, match='trainable parameters of its own, scale'):
        DeviceSeparateDistributedDataParallel(OwnParameter())
    frozen = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    expected = 'no child of Sequential has a parameter that requires a gradient'
    with pytest.raises(ModelError, match=expected):
        DeviceSeparateDistributedDataParallel(frozen)


@pytest.mark.parametrize(
    ('asked', 'built'),
    [
        ('MMSeparateDistributedDataParallel', 'DeviceSeparateDistributedDataParallel'),
        ('mmengine.MMSeparateDistributedDataParallel', 'DeviceSeparateDistributedDataParallel'),
        (MMSeparateDistributedDataParallel, 'DeviceSeparateDistributedDataParallel'),
        ('MMDistributedDataParallel', 'DeviceDistributedDataParallel'),
        ('MMFullyShardedDataParallel', 'MMFullyShardedDataParallel'),
    ],
)
def test_configs_that_name_mmengines_wrapper_get_ours(asked, built):
    found = wrapper_config(dict(type=asked, broadcast_buffers=False))
    kind = found.pop('type')  # a name that this PyTorch does not have stays
    assert getattr(kind, '__name__', kind) == built
    assert found == dict(broadcast_buffers=False)


def unfreeze(accelerator):
    context = start(accelerator)
    model = TinyGAN()
    model.discriminator.requires_grad_(False)
    wrapper = DeviceSeparateDistributedDataParallel(model)
    assert len(wrapper.parts) == 1
    model.discriminator.requires_grad_(True)
    steps = OptimWrapperDict(
        generator=OptimWrapper(torch.optim.SGD(model.generator.parameters(), lr=0.1)),
        critic=OptimWrapper(torch.optim.SGD(model.discriminator.parameters(), lr=0.1)),
    )
    wrapper._follow_trainable()
    assert len(wrapper.parts) == 2
    trained_by = model.discriminator
    rank = torch.distributed.get_rank()
    trained_by(torch.full((2, 64), float(rank + 1)).to(context.device)).sum().backward()
    gradient = next(trained_by.parameters()).grad.cpu().numpy()
    model.extra = nn.Parameter(torch.ones(1, device=context.device))
    with pytest.raises(ModelError, match='trainable parameters of its own, extra'):
        wrapper.train_step({}, steps)
    return gradient


@each
def test_a_child_that_begins_to_be_trained_is_wrapped(accelerator):
    one, other = run_ranks(unfreeze, 2, accelerator, **job_of(accelerator))
    assert (one == other).all()
