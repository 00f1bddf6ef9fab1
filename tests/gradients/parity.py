"""Scenarios of data parallel training, run under PyTorch's DDP on the CPU and under ours.

A scenario takes ``wrap`` (module → wrapper), a device and a rank, trains a little with data that
differs between ranks, and returns host tensors to compare.
"""

import contextlib
import functools

import torch
from torch import distributed as torch_dist, nn

from mmdevplug import DeviceDistributedDataParallel
from tests.jobs import checkpoint, largest_difference, start


def _data(rank, step, *shape):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator)


def _net(rank, *more):
    # A seed for each rank: wrapping has to make the ranks equal.
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), *more)


def _result(wrapper):
    found = {name: value.detach().cpu() for name, value in wrapper.module.state_dict().items()}
    for name, parameter in wrapper.module.named_parameters():
        gradient = parameter.grad
        found[f'{name}.grad'] = torch.zeros(()) if gradient is None else gradient.detach().cpu()
    return found


def _train(wrapper, device, rank, steps=3, forward=None):
    trainable = [p for p in wrapper.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = _data(rank, step, 3, 6).to(device)
        outputs = wrapper(inputs) if forward is None else forward(wrapper, inputs, step)
        outputs.square().mean().backward()
        optimizer.step()
    return _result(wrapper)


def initial_weights(wrap, device, rank):
    wrapper = wrap(_normalized(rank))
    return {name: value.detach().cpu() for name, value in wrapper.module.state_dict().items()}


def _trained(make, forward=None, **options):
    """A scenario that trains what ``make`` gives for a rank."""
    return lambda wrap, device, rank: _train(
        wrap(make(rank), **options), device, rank, forward=forward
    )


def accumulation(wrap, device, rank):
    wrapper = wrap(_net(rank))
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(6):
        inputs = _data(rank, step, 3, 6).to(device)
        if step % 3 == 2:
            wrapper(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            # As MMEngine does it: forward under no_sync, backward after it.
            with wrapper.no_sync():
                loss = wrapper(inputs).square().mean()
            loss.backward()
    return _result(wrapper)


def forwards_with_and_without_sync(wrap, device, rank):
    """One backward of three forwards, of which the last is to average, as accelerate tests it."""
    wrapper = wrap(_net(rank))
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        losses = []
        for part in range(3):
            inputs = _data(rank, 3 * step + part, 3, 6).to(device)
            with wrapper.no_sync() if part < 2 else contextlib.nullcontext():
                losses.append(wrapper(inputs).square().mean())
        sum(losses).backward()
        optimizer.step()
    return _result(wrapper)


def several_backwards(wrap, device, rank):
    wrapper = wrap(_net(rank))
    for step in range(3):
        wrapper(_data(rank, step, 3, 6).to(device)).square().mean().backward()
    return _result(wrapper)


class _Branches(nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.common = nn.Linear(6, 4)
        self.even = nn.Linear(4, 4)
        self.odd = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, inputs, branch):
        return getattr(self, branch)(self.common(inputs))


def unused_on_some_ranks(wrap, device, rank):
    def forward(wrapper, inputs, step):
        return wrapper(inputs, 'odd' if (rank + step) % 2 else 'even')

    wrapper = wrap(_Branches(rank), find_unused_parameters=True)
    return _train(wrapper, device, rank, steps=4, forward=forward)


def unused_on_all_ranks(wrap, device, rank):
    def forward(wrapper, inputs, step):
        return wrapper(inputs, 'even')

    wrapper = wrap(_Branches(rank), find_unused_parameters=True)
    found = _train(wrapper, device, rank, forward=forward)
    untouched = wrapper.module.never.weight.grad is None
    return dict(found, untouched=torch.tensor(float(untouched)))


def _frozen(rank):
    net = _net(rank)
    net[0].requires_grad_(False)
    return net


def _normalized(rank):
    return _net(rank, nn.BatchNorm1d(4))


class _Tied(nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, inputs):
        return self.again(self.second(self.first(inputs)).tanh())


def shared(wrap, device, rank):
    wrapper = wrap(_Tied(rank))
    found = _train(wrapper, device, rank)
    tied = wrapper.module.second.weight is wrapper.module.first.weight
    return dict(found, tied=torch.tensor(float(tied)))


class _Mixed(nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.fp32 = nn.Linear(6, 5)
        self.fp64 = nn.Linear(5, 5).double()
        self.bf16 = nn.Linear(5, 4).bfloat16()

    def forward(self, inputs):
        hidden = self.fp64(self.fp32(inputs).double())
        return self.bf16(hidden.bfloat16()).float()


class _Checkpointed(nn.Module):
    def __init__(self, rank, reentrant):
        super().__init__()
        self.net = _net(rank)
        self.tail = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, inputs):
        inputs.requires_grad_(True)
        options = dict(use_reentrant=self.reentrant)
        return self.tail(checkpoint(self.net, inputs, **options))


class _Nested(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.net = _net(rank)

    def forward(self, inputs):
        return dict(parts=[self.net(inputs), (self.net(inputs * 2), None)])


def _add_parts(wrapper, inputs, step):
    first, (second, _) = wrapper(inputs)['parts']
    return first + second


SCENARIOS = dict(
    initial_weights=initial_weights,
    plain=_trained(_net),
    accumulation=accumulation,
    forwards_with_and_without_sync=forwards_with_and_without_sync,
    several_backwards=several_backwards,
    several_forwards=_trained(_net, lambda net, inputs, _: net(inputs) + net(inputs * 2)),
    unused_on_some_ranks=unused_on_some_ranks,
    unused_on_all_ranks=unused_on_all_ranks,
    frozen=_trained(_frozen),
    shared=shared,
    mixed_dtypes=_trained(_Mixed),
    buffers=_trained(_normalized, broadcast_buffers=True),
    own_buffers=_trained(_normalized, broadcast_buffers=False),
    checkpointed=_trained(functools.partial(_Checkpointed, reentrant=False)),
    checkpointed_reentrant=_trained(functools.partial(_Checkpointed, reentrant=True)),
    nested_outputs=_trained(_Nested, _add_parts),
)


def compare_all(accelerator):
    """Run every scenario under PyTorch's DDP on the CPU and under ours on an accelerator.

    By scenario it returns the largest difference, None where PyTorch's DDP cannot do it, or what
    the vendor's backend said where that refuses a dtype.
    """
    from torch.nn.parallel import DistributedDataParallel

    context = start(accelerator)
    rank = torch_dist.get_rank()
    # That of all ranks may refuse tensors of the host.
    host_group = torch_dist.new_group(backend='gloo')
    ddp = functools.partial(DistributedDataParallel, process_group=host_group)
    found = {}
    for name, scenario in SCENARIOS.items():
        try:
            expected = scenario(ddp, torch.device('cpu'), rank)
        except RuntimeError as error:
            if str(error) != 'Invalid scalar type':
                raise
            found[name] = None
            continue
        try:
            actual = scenario(DeviceDistributedDataParallel, context.device, rank)
        except RuntimeError as error:
            if 'HCCL allreduce: Unsupported data type Double' not in str(error):
                raise
            found[name] = str(error)
            continue
        if context.accelerator.compilation.lazy:
            # torch_xla keeps the biased variance, PyTorch the unbiased one.
            for state in (expected, actual):
                state.pop('3.running_var', None)
        found[name] = largest_difference(expected, actual)
    return found
