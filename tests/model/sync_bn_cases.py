"""Synchronized batch normalization: cases that ranks run, and one process runs on the whole batch.

Every rank gets its share of a batch. What one process computes from the whole batch in float64
with PyTorch's ordinary layer is what the ranks must have computed together.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Dict, Tuple

import torch
from torch import distributed as torch_dist, nn

from mmdevplug.model import norm_layers
from mmdevplug.model.frozen_bn import give_frozen_gradients
from mmdevplug.model.move import move_module
from mmdevplug.model.norm_layers import convert_norm_layers
from mmdevplug.model.sync_bn import DeviceSyncBatchNorm
from tests.jobs import checkpoint, start

CHANNELS = 4


@dataclass(frozen=True)
class Case:
    """A layer and its input."""

    shape: Tuple[int, ...] = (3, 2)  #: Of a sample, less its channels.
    sizes: Tuple[int, ...] = (4, 4, 4)  #: Samples of each rank, of which the first are taken.
    options: Dict = field(default_factory=dict)  #: Of the layer.
    dtype: torch.dtype = torch.float32  #: Of the input.
    offset: float = 0.5  #: Added to inputs that are drawn from a normal distribution.
    how: str = 'once'  #: How the layer is called: see CALLS.
    train: bool = True  #: Whether the layer is in training mode.
    tolerance: float = 1e-5  #: Of outputs and gradients.


CASES = {
    '1d': Case(shape=()),
    '1d with length': Case(shape=(5,)),
    '2d': Case(),
    '3d': Case(shape=(2, 3, 2)),
    'channels last': Case(how='channels_last'),
    'unequal batches': Case(sizes=(3, 5, 1)),
    'one sample': Case(shape=(), sizes=(1, 1, 1)),
    'empty batch': Case(sizes=(6, 0, 2)),
    'empty first batch': Case(shape=(), sizes=(0, 3, 2)),
    'nothing at all': Case(sizes=(0, 0, 0)),
    # Sums of squares in float32 would lose the variance altogether.
    'large mean': Case(offset=1e4, tolerance=1e-2),
    'bfloat16': Case(dtype=torch.bfloat16, tolerance=4e-2),
    'float64': Case(dtype=torch.float64, options=dict(dtype=torch.float64)),
    'cumulative average': Case(options=dict(momentum=None)),
    'not affine': Case(options=dict(affine=False)),
    'not tracked': Case(options=dict(track_running_stats=False)),
    'eval': Case(train=False),
    'no gradient': Case(how='without_gradient'),
    'two calls': Case(how='twice'),
    'checkpointed': Case(how='checkpointed'),
    'checkpointed, reentrant': Case(how='checkpointed_reentrant'),
}


CALLS = dict(
    once=lambda layer, inputs: layer(inputs),
    channels_last=lambda layer, inputs: layer(
        inputs.contiguous(memory_format=torch.channels_last)
    ),
    without_gradient=torch.no_grad()(lambda layer, inputs: layer(inputs)),
    twice=lambda layer, inputs: layer(layer(inputs) + 1),
    # PyTorch 2.1 asks CUDA for the random state of a lazy device; these layers draw nothing.
    checkpointed=partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    checkpointed_reentrant=partial(checkpoint, use_reentrant=True, preserve_rng_state=False),
)


def build(case):
    """An ordinary layer, in a model, with weights and statistics unlike those it starts with."""
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    layer = kind[len(case.shape)](CHANNELS, **case.options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in layer.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
    return nn.Sequential(layer).train(case.train)


def data(case, step, ranks, rank=None):
    """Inputs, and factors of the outputs in the loss: of one rank, or of all."""
    sizes = case.sizes[:ranks]
    generator = torch.Generator().manual_seed(step)
    shape = (sum(sizes), CHANNELS, *case.shape)
    inputs = (torch.randn(shape, generator=generator) + case.offset).to(case.dtype)
    factors = torch.randn(shape, generator=generator)
    if rank is None:
        return inputs, factors
    return inputs.split(sizes)[rank], factors.split(sizes)[rank]


def run(model, case, batches, device, dtype=None, steps=3):
    """Run the layer forth and back a few times.

    Returns:
        dict: Arrays: outputs and gradients of inputs of the last step, gradients of the weights
        summed over the steps, and the state dict.
    """
    for step in range(steps):
        inputs, factors = batches(step)
        inputs = inputs.to(device).to(dtype or inputs.dtype).requires_grad_()
        outputs = CALLS[case.how](model, inputs)
        assert outputs.dtype == inputs.dtype
        assert outputs.shape == inputs.shape
        if outputs.requires_grad:
            (
                outputs.to(torch.float64 if dtype else torch.float32) * factors.to(device)
            ).sum().backward()
    found = dict(outputs=outputs, **model.state_dict())
    found['inputs.grad'] = inputs.grad
    for name, parameter in model.named_parameters():
        found[f'{name}.grad'] = parameter.grad
    return {
        name: value.detach().cpu().double().numpy()
        for name, value in found.items()
        if value is not None
    }


def run_all(accelerator):
    """Run every case on this rank."""
    context = start(accelerator)
    rank, ranks = torch_dist.get_rank(), torch_dist.get_world_size()
    norm_layers.torch_sync_bn_works = lambda *_: False  # ours, also where PyTorch's works
    found = {}
    for name, case in CASES.items():
        model = move_module(build(case), context.device)
        convert_norm_layers(model, context.accelerator, context.device, 'auto')
        assert type(model[0]) is DeviceSyncBatchNorm
        if context.accelerator.compilation.lazy:
            give_frozen_gradients(model)
        found[name] = run(
            model, case, lambda step, case=case: data(case, step, ranks, rank), context.device
        )
    return found


def expected(case, ranks):
    """What one process on the CPU finds, from the whole batch and in float64."""
    model = build(case).double()
    return run(model, case, lambda step: data(case, step, ranks), 'cpu', torch.float64)


def compare(name, found, ranks):
    """Assert that the ranks together found what one process finds."""
    case = CASES[name]
    wanted = expected(case, ranks)
    for key, value in wanted.items():
        parts = [torch.as_tensor(result[key]) for result in found]
        if key in ('outputs', 'inputs.grad'):
            together, tolerance = torch.cat(parts), case.tolerance
        elif key.endswith('.grad'):
            # Those of each rank are of its own batch; the wrapper averages them.
            together, tolerance = torch.stack(parts).sum(0), case.tolerance * len(parts[0])
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), key
            together, tolerance = parts[0], 1e-5
        scale = 1.0 if 'running' not in key else max(1.0, abs(case.offset))
        torch.testing.assert_close(
            together,
            torch.as_tensor(value),
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda text, key=key: f'{key}: {text}',
        )
    assert all(result.keys() == wanted.keys() for result in found)
