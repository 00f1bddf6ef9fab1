"""The wrapper's interface, and models it refuses."""

from collections import Counter
from itertools import product

import pytest
import torch
from mmengine.model import MMDistributedDataParallel, is_model_wrapper
from torch import nn

from mmdevplug import DeviceDistributedDataParallel
from mmdevplug.accelerators import CPUAccelerator
from mmdevplug.distributed.staged_groups import staged_counterpart
from mmdevplug.errors import LaunchError, ModelError
from mmdevplug.gradients.lazy_staging import LazyStaging
from mmdevplug.staged import StagedProcessGroup
from tests.columns import LAZY
from tests.jobs import start
from tests.ranks import in_ranks


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@in_ranks(2)
def test_interchangeable_with_mmengines_wrapper(accelerator):
    context = start(accelerator)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wrapper = DeviceDistributedDataParallel(module, device_ids=[5], output_device=5)
    stock = MMDistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    stock.load_state_dict({name: value.cpu() for name, value in wrapper.state_dict().items()})
    wrapper.load_state_dict(stock.state_dict())
    assert is_model_wrapper(wrapper)
    assert isinstance(wrapper, MMDistributedDataParallel)
    assert wrapper.module is module
    assert {tensor.device for tensor in wrapper.state_dict().values()} == {context.device}
    assert list(wrapper.state_dict()) == list(stock.state_dict())
    assert all(hasattr(wrapper, f'{name}_step') for name in ('train', 'val', 'test'))
    assert wrapper.staging is None


class SavesLittle(nn.Linear):
    """Saves an extra state, which is no tensor, and neither its weights nor its buffer."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer('steps', torch.zeros(2))

    def get_extra_state(self):
        return dict(kept='text')

    def set_extra_state(self, state):
        assert state == dict(kept='text')

    def state_dict(self, *args, **kwargs):
        saved = super().state_dict(*args, **kwargs)
        return {name: value for name, value in saved.items() if name == '_extra_state'}


@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
@in_ranks(2)
def test_weights_of_rank_0_are_sent_whatever_is_saved(accelerator):
    start(accelerator)
    rank = torch.distributed.get_rank()
    module = SavesLittle()
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            value.fill_(rank + 1)
    wrapper = DeviceDistributedDataParallel(module)
    sent = [*wrapper.module.parameters(), *wrapper.module.buffers()]
    assert len(sent) == 3
    assert all(value.cpu().eq(1).all() for value in sent)


class StaysOnHost(nn.Linear):
    def _apply(self, fn, recurse=True):
        return self


#: What makes a module, options, and the error that names them.
REFUSED = dict(
    wrapped=(
        lambda: DeviceDistributedDataParallel(nn.Linear(2, 2)),
        {},
        ModelError,
        ['wrapped already, in DeviceDistributedDataParallel'],
    ),
    frozen=(
        lambda: nn.Linear(2, 2).requires_grad_(False),
        {},
        ModelError,
        ['2 parameters, all frozen'],
    ),
    unknown_option=(
        lambda: nn.Linear(2, 2),
        dict(find_unused_paramters=True),
        TypeError,
        ['find_unused_paramters', "did you mean 'find_unused_parameters'?"],
    ),
    immovable=(
        lambda: nn.Sequential(nn.Linear(2, 2), StaysOnHost(2, 2)),
        {},
        ModelError,
        ['1.weight on cpu', '{device}'],
    ),
)


@pytest.mark.parametrize(
    ('accelerator', 'case'),
    [*product(['cpu', 'zeta'], ['wrapped', 'frozen', 'unknown_option']), ('zeta', 'immovable')],
)
@in_ranks(2)
def test_what_is_refused_on_all_ranks(accelerator, case):
    make, options, kind, told = REFUSED[case]
    device = start(accelerator).device
    with pytest.raises(kind) as raised:
        DeviceDistributedDataParallel(make(), **options)
    assert raised.type is kind
    assert all(words.format(device=device) in str(raised.value) for words in told), raised.value


@in_ranks(2)
def test_sparse_gradients_cannot_be_staged():
    start('cpu')
    # No lazy device has sparse kernels, so the host itself is staged here.
    module = nn.Embedding(8, 4, sparse=True)
    parameters = list(module.named_parameters())
    staging = LazyStaging(parameters, CPUAccelerator(), staged_counterpart())
    outputs = module(torch.tensor([1, 2]))
    staging.prepare(outputs, synchronize=True)
    with pytest.raises(ModelError, match="'weight'"):
        outputs.sum().backward()


@pytest.mark.parametrize('accelerator', [LAZY])
@in_ranks(2)
def test_methods_of_ddp_are_refused_where_gradients_wait_for_the_end(accelerator):
    start(accelerator)
    wrapper = DeviceDistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"join\(\) needs PyTorch's DDP"):
        wrapper.join()
    with pytest.raises(ModelError, match=r"register_comm_hook\(\) needs PyTorch's DDP"):
        wrapper.register_comm_hook(None, print)


def test_needs_a_process_group():
    with pytest.raises(LaunchError, match='init_device'):
        DeviceDistributedDataParallel(nn.Linear(2, 2))


@in_ranks(2)
def test_few_messages():
    device, sent = start('zeta').device, Counter()
    original = StagedProcessGroup._run

    def counted(self, name, *args):
        sent[name] += 1
        return original(self, name, *args)

    StagedProcessGroup._run = counted
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)], nn.BatchNorm1d(8))
    wrapper = DeviceDistributedDataParallel(model, broadcast_buffers=False)
    inputs = torch.randn(4, 8).to(device)
    wrapper(inputs).sum().backward()  # DDP sends the order of its buckets after it
    wrapper(inputs)
    sent.clear()
    wrapper(inputs).sum().backward()
    assert sent == dict(average=1)


@in_ranks(2)
def test_a_users_hook_stays_when_other_parameters_are_trained():
    """Also after a layer was frozen, which builds DDP anew."""
    start('cpu')

    def hook(state, bucket):
        done = torch.futures.Future()
        done.set_result(torch.full_like(bucket.buffer(), 7.0))
        return done

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    wrapper = DeviceDistributedDataParallel(model)
    wrapper.register_comm_hook(None, hook)
    for frozen, expected in ((False, [7.0] * 4), (True, [None, None, 7.0, 7.0])):
        model[0].requires_grad_(not frozen)
        model.zero_grad(set_to_none=True)
        wrapper(torch.ones(4, 3)).sum().backward()
        gradients = [each.grad for each in model.parameters()]
        assert [each if each is None else float(each.mean()) for each in gradients] == expected
