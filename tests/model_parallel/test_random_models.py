"""Random models, devices and limits: a plan keeps every promise, or is refused."""

import random

import pytest
import torch
from torch import nn

from mmdevplug.errors import PlacementError
from mmdevplug.model_parallel import STRATEGIES, DevicePlan, plan
from mmdevplug.model_parallel.unsplittable import WholeModules
from tests.model_parallel.models import Residual, every_name, without_memory


class Custom(nn.Module):
    """Whatever is put into it."""


def leaf(rng):
    width = rng.randint(1, 12)
    kinds = [
        lambda: nn.Linear(width, rng.randint(1, 12)),
        lambda: nn.LayerNorm(width),
        lambda: nn.BatchNorm1d(width, affine=rng.random() < 0.5),
        lambda: nn.Dropout(),
        lambda: nn.Sequential(),
        lambda: Residual(width),
        lambda: nn.MultiheadAttention(4, 2),
    ]
    return rng.choice(kinds)()


def tree(rng, depth):
    if depth == 0 or rng.random() < 0.2:
        return leaf(rng)
    if rng.random() < 0.5:
        children = [tree(rng, depth - 1) for _ in range(rng.randint(1, 5))]
        return nn.Sequential(*children) if rng.random() < 0.5 else nn.ModuleList(children)
    module = Custom()
    for place in range(rng.randint(0, 4)):
        setattr(module, f'part{place}', tree(rng, depth - 1))
    if rng.random() < 0.4:
        module.token = nn.Parameter(torch.zeros(rng.randint(1, 9)))
    if rng.random() < 0.4:
        module.register_buffer('table', torch.zeros(rng.randint(1, 9)), rng.random() < 0.5)
    return module


def tie(rng, model):
    """Let a few parameters, and perhaps a module, occur twice."""
    owners = [m for m in model.modules() if m._parameters.get('weight') is not None]
    for _ in range(rng.randint(0, 2) if len(owners) > 1 else 0):
        one, other = rng.sample(owners, 2)
        other.weight = one.weight
    if rng.random() < 0.3:
        model.again = rng.choice(owners) if owners else nn.Linear(2, 2)


def draw(rng):
    with without_memory():
        model = Custom()
        for place in range(rng.randint(1, 6)):
            setattr(model, f'top{place}', tree(rng, 3))
        tie(rng, model)
    count = rng.randint(1, 5)
    total = sum(p.numel() * 4 for p in model.parameters())
    memory = {
        i: rng.randint(0, max(1, int(2.5 * total / count)))
        for i in range(count)
        if rng.random() < 0.5
    }
    options = dict(
        strategy=rng.choice(STRATEGIES),
        max_memory=memory if rng.random() < 0.6 else None,
        force_balance=rng.choice([None, True, False]),
        exclude_cpu=rng.random() < 0.7,
        training=rng.random() < 0.3,
        balance_threshold=rng.choice([0.0, 0.3, 1.0]),
    )
    return model, f'xla:0-{count - 1}', options


def check(model, made, options):
    device_of = {}
    held = dict.fromkeys(made.devices, 0)
    for name, tensor in every_name(model):
        device = str(made.device_of(name))
        if id(tensor) not in device_of:
            times = 4 if options['training'] and isinstance(tensor, nn.Parameter) else 1
            held[device] += times * tensor.numel() * tensor.element_size()
        assert device_of.setdefault(id(tensor), device) == device, name
    assert made.loads == held
    for name, limit in (made.capacities or {}).items():
        assert made.loads[name] <= limit
    whole = WholeModules(model)
    for name, module in model.named_modules():
        if (name, module) in whole and (made.strategy == 'balanced' or name):
            made.device_of(name)
    # Accelerate's own map may leave a device empty, of which a warning tells.
    is_auto = options['strategy'] == 'auto'
    if options['force_balance'] or (options['force_balance'] is None and not is_auto):
        assert all(made.loads[name] or name == 'cpu' for name in made.devices)
    uneven = len(made.ideals) > 1 and made.imbalance > options['balance_threshold']
    assert bool(made.warning) >= uneven
    assert not (made.warning and options['force_balance'])
    if options['exclude_cpu']:
        assert 'cpu' not in made.devices
    assert DevicePlan.from_dict(made.to_dict()) == made
    assert str(made)


@pytest.mark.parametrize('seed', range(4))
def test_every_plan_keeps_its_promises(seed):
    rng = random.Random(seed)
    planned = refused = 0
    for _ in range(40):
        model, devices, options = draw(rng)
        try:
            made = plan(model, devices, **options)
        except PlacementError:
            refused += 1
            continue
        planned += 1
        check(model, made, options)
    assert planned > 20
    assert refused
