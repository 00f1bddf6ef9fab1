"""The wrapper's interface, and models it refuses."""

from collections import Counter

import pytest
import torch
from mmengine.model import MMDistributedDataParallel, is_model_wrapper
from torch import nn

from mmdevplug import DeviceDistributedDataParallel, init_device
from mmdevplug.accelerators import CPUAccelerator
from mmdevplug.distributed.staged_groups import staged_counterpart
from mmdevplug.errors import LaunchError
from mmdevplug.gradients.lazy_staging import LazyStaging
from mmdevplug.staged import StagedProcessGroup
from tests.columns import needs_lazy
from tests.jobs import install_card
from tests.ranks import errors_of_ranks, run_ranks


def in_job(accelerator, check):
    install_card(accelerator)
    context = init_device('pytorch', accelerator, timeout=60)
    return check(context)


def run(accelerator, check, world_size=2, **options):
    return run_ranks(in_job, world_size, accelerator, check, **options)


both = pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])


def look(context):
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wrapper = DeviceDistributedDataParallel(module, device_ids=[5], output_device=5)
    stock = MMDistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    stock.load_state_dict({name: value.cpu() for name, value in wrapper.state_dict().items()})
    wrapper.load_state_dict(stock.state_dict())
    return dict(
        is_wrapper=is_model_wrapper(wrapper),
        same_module=wrapper.module is module,
        devices={str(tensor.device) for tensor in wrapper.state_dict().values()},
        expected={str(context.device)},
        keys=list(wrapper.state_dict()) == list(stock.state_dict()),
        steps=all(hasattr(wrapper, f'{name}_step') for name in ('train', 'val', 'test')),
        subclass=isinstance(wrapper, MMDistributedDataParallel),
        staged=wrapper.staging is not None,
    )


@both
def test_interchangeable_with_mmengines_wrapper(accelerator):
    for found in run(accelerator, look):
        assert found.pop('devices') == found.pop('expected')
        assert not found.pop('staged')
        assert all(found.values()), found


def wrap_twice(context):
    DeviceDistributedDataParallel(DeviceDistributedDataParallel(nn.Linear(2, 2)))


def wrap_frozen(context):
    DeviceDistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def wrap_with_unknown_option(context):
    DeviceDistributedDataParallel(nn.Linear(2, 2), find_unused_paramters=True)


class StaysOnHost(nn.Linear):
    def _apply(self, fn, recurse=True):
        return self


def wrap_immovable(context):
    DeviceDistributedDataParallel(nn.Sequential(nn.Linear(2, 2), StaysOnHost(2, 2)))


def sparse(context):
    # No lazy device has sparse kernels, so the host itself is staged here.
    module = nn.Embedding(8, 4, sparse=True)
    staging = LazyStaging(list(module.named_parameters()), CPUAccelerator(), staged_counterpart())
    outputs = module(torch.tensor([1, 2]))
    staging.prepare(outputs, synchronize=True)
    outputs.sum().backward()


@pytest.mark.parametrize(
    ('accelerator', 'check', 'kind', 'told'),
    [
        *(
            (accelerator, *refused)
            for accelerator in ('cpu', 'zeta')
            for refused in (
                (wrap_twice, 'ModelError', ['wrapped already, in DeviceDistributedDataParallel']),
                (wrap_frozen, 'ModelError', ['2 parameters, all frozen']),
                (
                    wrap_with_unknown_option,
                    'TypeError',
                    ['find_unused_paramters', "did you mean 'find_unused_parameters'?"],
                ),
            )
        ),
        ('zeta', wrap_immovable, 'ModelError', ['1.weight on cpu', 'zeta:1']),
        ('cpu', sparse, 'ModelError', ["'weight'"]),
    ],
    ids=lambda value: (
        ' '.join(value) if isinstance(value, list) else getattr(value, '__name__', None)
    ),
)
def test_what_is_refused_on_all_ranks(accelerator, check, kind, told):
    errors = errors_of_ranks(in_job, 2, accelerator, check, together=True)
    assert sorted(errors) == [0, 1]
    assert errors[1][0] == kind
    assert all(words in errors[1][1] for words in told), errors[1][1]


def use_ddp_only_methods(context):
    wrapper = DeviceDistributedDataParallel(nn.Linear(2, 2))
    called = []
    for method in (wrapper.join, lambda: wrapper.register_comm_hook(None, print)):
        try:
            method()
        except RuntimeError as error:
            called.append((type(error).__name__, str(error)))
    return called


@needs_lazy
def test_methods_of_ddp_are_refused_where_gradients_wait_for_the_end():
    for found in run('lazy', use_ddp_only_methods):
        for (kind, message), method in zip(found, ['join', 'register_comm_hook']):
            assert kind == 'ModelError'
            assert f"{method}() needs PyTorch's DDP" in message


def test_needs_a_process_group():
    with pytest.raises(LaunchError, match='init_device'):
        DeviceDistributedDataParallel(nn.Linear(2, 2))


def count_messages(context):
    """Collectives of an iteration, by kind."""
    sent = Counter()
    original = StagedProcessGroup._run

    def counted(self, name, *args):
        sent[name] += 1
        return original(self, name, *args)

    StagedProcessGroup._run = counted
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)], nn.BatchNorm1d(8))
    wrapper = DeviceDistributedDataParallel(model, broadcast_buffers=False)
    inputs = torch.randn(4, 8).to(context.device)
    wrapper(inputs).sum().backward()  # DDP sends the order of its buckets after it
    wrapper(inputs)
    sent.clear()
    wrapper(inputs).sum().backward()
    return dict(sent)


def test_few_messages():
    for step in run('zeta', count_messages):
        assert step == dict(average=1)


def hook_of_a_user(context):
    """Gradients by a hook of the user's, also after a layer was frozen, which builds DDP anew."""

    def hook(state, bucket):
        done = torch.futures.Future()
        done.set_result(torch.full_like(bucket.buffer(), 7.0))
        return done

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    wrapper = DeviceDistributedDataParallel(model)
    wrapper.register_comm_hook(None, hook)
    found = []
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        model.zero_grad(set_to_none=True)
        wrapper(torch.ones(4, 3, device=context.device)).sum().backward()
        gradients = [each.grad for each in model.parameters()]
        found.append([each if each is None else float(each.mean()) for each in gradients])
    return found


def test_a_users_hook_stays_when_other_parameters_are_trained():
    for first, second in run('cpu', hook_of_a_user):
        assert first == [7.0] * 4
        assert second == [None, None, 7.0, 7.0]
