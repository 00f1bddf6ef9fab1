"""The wrapper that trains each child by itself: its interface, and models it refuses."""

import pytest
import torch
from mmengine.model import MMSeparateDistributedDataParallel, is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner.checkpoint import get_state_dict
from torch import distributed as torch_dist, nn

from mmdevplug import DeviceDistributedDataParallel
from mmdevplug.gradients import DeviceSeparateDistributedDataParallel
from mmdevplug.model.place_model import wrapper_config
from mmdevplug.staged.staged_group import StagedProcessGroup
from tests.columns import CUDA, NATIVE, job_of, staged
from tests.features.parts import TinyGAN, set_requires_grad
from tests.jobs import start
from tests.ranks import RanksFailed, errors_of_ranks, run_ranks

each = pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE, CUDA])


def in_job(accelerator, check):
    return check(start(accelerator))


def wrapped_gan(**options):
    model = TinyGAN()
    model.register_buffer('own', torch.zeros(2))
    return DeviceSeparateDistributedDataParallel(model, **options), model


def look(context):
    wrapper, model = wrapped_gan(detect_anomalous_params=True)
    wrapper.train()
    wrapped = [name for name, child in model.named_children() if is_model_wrapper(child)]
    return dict(
        subclass=isinstance(wrapper, MMSeparateDistributedDataParallel),
        is_wrapper=is_model_wrapper(wrapper),
        wrapped=wrapped,
        parts=all(isinstance(part, DeviceDistributedDataParallel) for part in wrapper.parts),
        option=all(part.detect_anomalous_params for part in wrapper.parts),
        devices={str(tensor.device) for tensor in wrapper.state_dict().values()},
        preprocessor=str(model.data_preprocessor.device),
        expected=str(context.device),
        keys=set(get_state_dict(model)) - set(TinyGAN().state_dict()),
        training=model.generator.module.training,
        evaluated=not wrapper.eval().module.generator.module.training,
        staged=wrapper.staging is not None,
    )


@each
def test_children_are_wrapped(accelerator):
    for found in run_ranks(in_job, 2, accelerator, look, **job_of(accelerator)):
        expected = found.pop('expected')
        assert found.pop('devices') == {expected}
        assert found.pop('preprocessor') == expected
        assert found.pop('wrapped') == ['generator', 'discriminator']
        assert found.pop('keys') == {'own'}
        assert found.pop('staged') == staged(accelerator)
        assert all(found.values()), found


def accumulate(context):
    wrapper, model = wrapped_gan()
    rank = torch_dist.get_rank()

    def backward():
        for part, size in ((model.generator, 8), (model.discriminator, 64)):
            part(torch.full((2, size), float(rank + 1)).to(context.device)).sum().backward()
        return [part.module[0].weight.grad.cpu().clone().numpy() for part in wrapper.parts]

    with wrapper.no_sync():
        flags = [part.require_backward_grad_sync for part in wrapper.parts]
        own = backward()
    again = [part.require_backward_grad_sync for part in wrapper.parts]
    for parameter in wrapper.parameters():
        parameter.grad = None
    return dict(flags=flags, again=again, own=own, averaged=backward())


@each
def test_no_sync_covers_all_children(accelerator):
    one, other = run_ranks(in_job, 2, accelerator, accumulate, **job_of(accelerator))
    for found in (one, other):
        assert found['flags'] == [False, False]
        assert found['again'] == [True, True]
    for part in (0, 1):
        assert abs(one['own'][part] - other['own'][part]).max() > 0
        mean = (one['own'][part] + other['own'][part]) / 2
        assert abs(one['averaged'][part] - mean).max() <= 1e-5 * abs(mean).max()
        assert (one['averaged'][part] == other['averaged'][part]).all()


def stock_no_sync(context):
    # What ours replaces: two children make the stock context yield twice.
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with MMSeparateDistributedDataParallel(model).no_sync():
        pass


def test_stock_no_sync_fails():
    with pytest.raises(RanksFailed, match="generator didn't stop"):
        run_ranks(in_job, 2, 'cpu', stock_no_sync)


def frozen_messages(context):
    """Buckets of a backward without and with a part that is frozen for the moment."""
    _, model = wrapped_gan(broadcast_buffers=True)
    set_requires_grad(model.discriminator, False)
    latent = torch.randn(4, 8).to(context.device)
    averaged, average = [], StagedProcessGroup.average
    StagedProcessGroup.average = lambda *args, **options: (
        averaged.append(1),
        average(*args, **options),
    )[1]
    model.generator(latent).sum().backward()
    without = len(averaged)
    model.discriminator(model.generator(latent)).sum().backward()
    return without, len(averaged) - without


def test_a_frozen_part_sends_nothing():
    for without, with_frozen in run_ranks(in_job, 2, 'zeta', frozen_messages):
        assert with_frozen == without > 0


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.part = nn.Linear(2, 2)


def wrap_own_parameter(context):
    DeviceSeparateDistributedDataParallel(OwnParameter())


def wrap_frozen(context):
    DeviceSeparateDistributedDataParallel(nn.Sequential(nn.Linear(2, 2)).requires_grad_(False))


@pytest.mark.parametrize(
    ('wrap', 'expected'),
    [
        (wrap_own_parameter, 'trainable parameters of its own, scale'),
        (wrap_frozen, 'no child of Sequential has a parameter that requires a gradient'),
    ],
)
def test_models_that_are_refused(wrap, expected):
    errors = errors_of_ranks(in_job, 2, 'zeta', wrap, together=True)
    assert sorted(errors) == [0, 1]
    for kind, message in errors.values():
        assert kind == 'ModelError'
        assert expected in message


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


def unfreeze(context):
    model = TinyGAN()
    model.discriminator.requires_grad_(False)
    wrapper = DeviceSeparateDistributedDataParallel(model)
    before = len(wrapper.parts)
    model.discriminator.requires_grad_(True)
    steps = OptimWrapperDict(
        **{
            name: OptimWrapper(torch.optim.SGD(child.parameters(), lr=0.1))
            for name, child in (('generator', model.generator), ('critic', model.discriminator))
        }
    )
    wrapper._follow_trainable()
    trained_by = model.discriminator
    rank = torch.distributed.get_rank()
    trained_by(torch.full((2, 64), float(rank + 1)).to(context.device)).sum().backward()
    gradient = next(trained_by.parameters()).grad.cpu().numpy()
    model.extra = nn.Parameter(torch.ones(1, device=context.device))
    refused = ''
    try:
        wrapper.train_step({}, steps)
    except RuntimeError as error:
        refused = str(error)
    return before, len(wrapper.parts), gradient, refused


@each
def test_a_child_that_begins_to_be_trained_is_wrapped(accelerator):
    one, other = run_ranks(in_job, 2, accelerator, unfreeze, **job_of(accelerator))
    assert one[:2] == other[:2] == (1, 2)
    assert (one[2] == other[2]).all()
    assert 'trainable parameters of its own, extra' in one[3]
