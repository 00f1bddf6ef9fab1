"""PyTorch's own lazy device: chosen by name alone, and what it does without a word."""

import warnings

import torch

from mmdevplug.accelerators import available_accelerators, choose_accelerator
from tests.columns import needs_lazy
from tests.ranks import in_ranks, run_ranks

pytestmark = needs_lazy


@in_ranks()
def test_chosen_by_name_alone():
    detected = choose_accelerator().accelerator.name
    assert detected != 'lazy'
    named = choose_accelerator('lazy')
    assert str(named.accelerator.device(0)) == 'lazy:0'
    assert 'lazy' not in available_accelerators()
    assert named.reason == "accelerator.type='lazy'"


def compute(operation):
    """Use an operation, and return what the accelerator warned of."""
    accelerator = choose_accelerator('lazy').accelerator
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        for _ in range(2):
            operation(torch.ones(3).to(accelerator.device(0)))
            accelerator.compilation.materialize()
    return [str(each.message) for each in told if 'has no aten' in str(each.message)]


def cube(x):
    return x * x * x


def lacking(x):
    return torch.igamma(x, x)


def test_operations_that_run_a_part_of_the_graph_twice_are_named_once():
    assert run_ranks(compute, 0, cube) == [[]]
    ((message,),) = run_ranks(compute, 0, lacking)
    assert 'has no aten::igamma' in message
    assert 'running statistics twice' in message


@in_ranks()
def test_fetching_a_part_runs_the_whole():
    """Fetch one of two tensors while both are recorded."""
    accelerator = choose_accelerator('lazy').accelerator
    layer = torch.nn.BatchNorm1d(2, momentum=0.5).to(accelerator.device(0))
    outputs = layer(torch.tensor([[0.0, 2.0], [2.0, 6.0]]).to(accelerator.device(0)))
    accelerator.copies.to_host([outputs.sum()])
    more = outputs + 1
    accelerator.compilation.materialize()
    # Half of the batch's means, 1 and 4; run twice, they would be 0.75 and 3.
    assert accelerator.copies.to_host([layer.running_mean, more])[0].tolist() == [0.5, 2.0]
