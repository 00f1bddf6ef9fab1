"""Trainings in which parameters begin or cease to be trained, on ranks and in one process."""

import torch
from torch import nn

from mmdevplug import DeviceDistributedDataParallel
from tests.gradients.averaging import rank
from tests.jobs import start, weights_of

STEPS = 6


def _net(width):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 4)
    )


def _unfreeze(net, optimizer, step, seed):
    if step == 2:
        net[0].requires_grad_(True)


def _unfreeze_in_steps(net, optimizer, step, seed):
    if step in (2, 4):
        net[4 - step].requires_grad_(True)


def _add_group(net, optimizer, step, seed):
    if step == 2:
        net[0].requires_grad_(True)
        optimizer.add_param_group(dict(params=list(net[0].parameters()), lr=0.02))


def _freeze(net, optimizer, step, seed):
    if step == 2:
        net[0].requires_grad_(False)


def _freeze_after_wrapping(net, optimizer, step, seed):
    if step == 0:
        net[0].requires_grad_(False)


def _replace(net, optimizer, step, seed):
    if step == 2:
        torch.manual_seed(seed)  # other weights on each rank: those of rank 0 count
        net[2] = nn.Linear(net[2].in_features, 5).to(net[0].weight.device)
        optimizer.add_param_group(dict(params=list(net[2].parameters())))


def _take_turns(net, optimizer, step, seed):
    net[0].requires_grad_(step % 2 == 0)
    net[2].requires_grad_(step % 2 == 1)


#: What is frozen at first, the change before a step, options of the wrapper, the first layer's
#: width, and steps whose gradients are accumulated.
SCENARIOS = dict(
    unfreeze=([0], _unfreeze, {}, 5, 1),
    unfreeze_in_steps=([0, 2], _unfreeze_in_steps, {}, 5, 1),
    in_shared_memory=([0], _unfreeze, {}, 120_000, 1),
    unfreeze_while_accumulating=([0], _unfreeze, {}, 5, 3),
    add_group=([0], _add_group, {}, 5, 1),
    freeze=([], _freeze, {}, 5, 1),
    freeze_after_wrapping=([], _freeze_after_wrapping, {}, 5, 1),
    replace=([], _replace, {}, 5, 1),
    take_turns=([], _take_turns, {}, 5, 1),
    take_turns_unused=([], _take_turns, dict(find_unused_parameters=True), 5, 1),
)


def _train(scenario, device, wrap, batch_of, seed):
    """Returns the weights of all steps' end, and how often averaging began anew."""
    frozen, change, options, width, accumulated = SCENARIOS[scenario]
    net = _net(width)
    for index in frozen:
        net[index].requires_grad_(False)
    wrapper = wrap(net, options)
    net = getattr(wrapper, 'module', wrapper)
    held = net.parameters()
    if change is _add_group:
        held = [p for p in held if p.requires_grad]
    optimizer = torch.optim.SGD(held, lr=0.05, momentum=0.9)
    sets = set()
    for step in range(STEPS):
        change(net, optimizer, step, seed)
        apply = (step + 1) % accumulated == 0
        wrapper.require_backward_grad_sync = apply  # as DDP's no_sync sets it
        wrapper(batch_of(step).to(device)).square().mean().backward()
        sets.add(id(getattr(wrapper, '_trainable', None)))
        if apply:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net), len(sets) - 1


def _batch(step, rank):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def on_ranks(accelerator):
    """Train all scenarios as a rank of a job."""
    device = start(accelerator).device

    def wrap(net, options):
        return DeviceDistributedDataParallel(net, broadcast_buffers=False, **options)

    return {
        each: _train(each, device, wrap, lambda step: _batch(step, rank()), rank())
        for each in SCENARIOS
    }


def in_one_process(scenario, ranks):
    """Train with the batches of all ranks."""

    def batch_of(step):
        return torch.cat([_batch(step, rank) for rank in range(ranks)])

    return _train(scenario, 'cpu', lambda net, options: net, batch_of, 0)[0]
