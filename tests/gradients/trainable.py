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


def _trained(index, trained=True):
    """The change that a layer is trained from now on, or no longer."""
    return lambda net, optimizer, seed: net[index].requires_grad_(trained)


def _add_group(net, optimizer, seed):
    net[0].requires_grad_(True)
    optimizer.add_param_group(dict(params=list(net[0].parameters()), lr=0.02))


def _replace(net, optimizer, seed):
    torch.manual_seed(seed)  # other weights on each rank: those of rank 0 count
    net[2] = nn.Linear(net[2].in_features, 5).to(net[0].weight.device)
    optimizer.add_param_group(dict(params=list(net[2].parameters())))


def _first_alone(net, optimizer, seed):
    net[0].requires_grad_(True)
    net[2].requires_grad_(False)


def _second_alone(net, optimizer, seed):
    net[0].requires_grad_(False)
    net[2].requires_grad_(True)


_TURNS = {step: _second_alone if step % 2 else _first_alone for step in range(STEPS)}
#: What is frozen at first, changes by the step before which they are made, options of the
#: wrapper, the first layer's width, and steps whose gradients are accumulated.
SCENARIOS = dict(
    unfreeze=([0], {2: _trained(0)}, {}, 5, 1),
    unfreeze_in_steps=([0, 2], {2: _trained(2), 4: _trained(0)}, {}, 5, 1),
    in_shared_memory=([0], {2: _trained(0)}, {}, 120_000, 1),
    unfreeze_while_accumulating=([0], {2: _trained(0)}, {}, 5, 3),
    add_group=([0], {2: _add_group}, {}, 5, 1),
    freeze=([], {2: _trained(0, False)}, {}, 5, 1),
    freeze_after_wrapping=([], {0: _trained(0, False)}, {}, 5, 1),
    replace=([], {2: _replace}, {}, 5, 1),
    take_turns=([], _TURNS, {}, 5, 1),
    take_turns_unused=([], _TURNS, dict(find_unused_parameters=True), 5, 1),
)


def _train(scenario, device, wrap, batch_of, seed):
    """Returns the weights of all steps' end, and how often averaging began anew."""
    frozen, changes, options, width, accumulated = SCENARIOS[scenario]
    net = _net(width)
    for index in frozen:
        net[index].requires_grad_(False)
    wrapper = wrap(net, options)
    net = getattr(wrapper, 'module', wrapper)
    held = net.parameters()
    if scenario == 'add_group':
        held = [p for p in held if p.requires_grad]
    optimizer = torch.optim.SGD(held, lr=0.05, momentum=0.9)
    sets = set()
    for step in range(STEPS):
        if step in changes:
            changes[step](net, optimizer, seed)
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
