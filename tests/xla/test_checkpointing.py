"""Segments of a model that run a second time during backward, on torch_xla and on the T20 path."""

from types import SimpleNamespace

import pytest

from tests.gradients.parity import compare_all
from tests.ranks import in_ranks, run_ranks
from tests.xla.executions import counts
from tests.xla.t20 import T20

pytestmark = pytest.mark.xla

KINDS = (None, 'reentrant', 'non-reentrant')


def segment_gradients(kind, probability, seed=7):
    """Gradients of a checkpointed segment, executions until they were on the host, and barriers.

    Args:
        kind (str, optional): How the segment is checkpointed; None if it is not.
        probability (float): Of dropout inside and after the segment.
        seed (int): Of the device's random numbers.
    """
    import torch
    import torch_xla
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from mmdevplug.accelerators import enter_rank_device

    accelerator, device = enter_rank_device()
    torch.manual_seed(0)
    segment = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Dropout(probability), nn.Linear(8, 8), nn.Tanh()
    ).to(device)
    inputs = torch.randn(4, 8).to(device).requires_grad_()
    torch.xla.manual_seed(seed)
    accelerator.synchronize(device)
    before, _ = counts()
    if kind is None:
        outputs = segment(inputs)
    else:
        outputs = checkpoint(segment, inputs, use_reentrant=kind == 'reentrant')
    outputs = nn.functional.dropout(outputs, probability)
    outputs.square().sum().backward()
    gradients = [inputs.grad, *(p.grad for p in segment.parameters())]
    barriers = 0
    if accelerator.name == 'xla':
        barriers = torch_xla._XLAC._get_xla_tensors_hlo(gradients).count('opt-barrier(')
    fetched = accelerator.copies.to_host(gradients)
    return [gradient.numpy() for gradient in fetched], counts()[0] - before, barriers


def all_kinds(accelerator, probability):
    from mmdevplug import init_device

    init_device('none', accelerator)
    return {kind: segment_gradients(kind, probability) for kind in KINDS}


@pytest.mark.parametrize('probability', [0.0, 0.5])
def test_gradients_and_executions_are_those_without_checkpointing(probability):
    (found,) = run_ranks(all_kinds, 0, 'xla', probability, environ=dict(CPU_NUM_DEVICES='2'))
    expected, executions, barriers = found[None]
    assert barriers == 0
    for kind in KINDS[1:]:
        gradients, count, barriers = found[kind]
        assert max(abs(a - b).max() for a, b in zip(gradients, expected)) <= 1e-6
        assert count == executions == 1
        # Without one, the compiler would undo the checkpointing.
        assert barriers == 1


@in_ranks()
def test_dropout_draws_from_the_seed():
    # Else the test above would compare gradients without dropout.
    from mmdevplug import init_device

    init_device('none', 'xla')
    one, other = [segment_gradients('reentrant', 0.5, seed)[0] for seed in (7, 8)]
    assert max(abs(a - b).max() for a, b in zip(one, other)) > 1e-2


@in_ranks(environ=dict(CPU_NUM_DEVICES='2'))
def test_the_module_that_pytorch_is_given():
    import torch

    from mmdevplug.accelerators import get_accelerator

    accelerator = get_accelerator('xla')
    accelerator.device(0)
    module = torch.xla
    accelerator.device(1)
    assert torch.xla is module  # registered once
    found = dict(count=module.device_count(), available=module.is_available())
    module.set_device(1)
    with module.device(0):
        inside = module.current_device()
        module.set_rng_state(module.get_rng_state('xla:1'), 0)
    states = [module.get_rng_state(index).tolist() for index in (0, 1)]
    with torch.random.fork_rng(devices=[0, 1], device_type='xla'):
        module.manual_seed(3)
        torch.rand(2, device='xla:1')
    after = [module.get_rng_state(index).tolist() for index in (0, 1)]
    found.update(inside=inside, outside=module.current_device())
    assert states[0] == states[1]
    assert after == states
    assert found == dict(count=2, available=True, inside=0, outside=1)


@in_ranks()
def test_no_module_before_a_device_is_used():
    import torch
    import torch_xla  # noqa: F401

    import mmdevplug.accelerators

    mmdevplug.accelerators.available_accelerators()
    assert not hasattr(torch, 'xla')


@pytest.mark.parametrize('probability', [0.0, 0.5])
@in_ranks(**T20)
def test_t20_drops_the_same_elements_when_a_segment_runs_again(probability):
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*does not report the state')
        found = all_kinds('gcu', probability)
    plain, one, other = (found[kind][0] for kind in KINDS)
    assert max(abs(a - b).max() for a, b in zip(one, other)) <= 1e-6
    assert any(abs(gradient).max() > 1e-3 for gradient in one)
    # A checkpointed segment begins with a new seed, so both draw other elements than without.
    for gradients in () if probability else (one, other):
        assert max(abs(a - b).max() for a, b in zip(gradients, plain)) <= 1e-6


@pytest.fixture(scope='module')
def t20_differences():
    return run_ranks(compare_all, 2, 'gcu', **T20)


@pytest.mark.parametrize('scenario', ['checkpointed', 'checkpointed_reentrant'])
def test_t20_trains_as_ddp_on_the_cpu(t20_differences, scenario):
    for found in t20_differences:
        assert found[scenario] <= 1e-5


def segment_of_an_object():
    import torch
    from torch.utils.checkpoint import checkpoint

    from mmdevplug import init_device

    device = init_device('none', 'xla').device
    layer, inputs, dtypes = torch.nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device), []

    def segment(sample):
        outputs = layer(sample.inputs)
        dtypes.append(outputs.dtype)
        return outputs.tanh()

    with torch.autocast('xla', dtype=torch.bfloat16):
        outputs = checkpoint(segment, SimpleNamespace(inputs=inputs), use_reentrant=False)
    outputs.float().sum().backward()
    return dtypes


def test_a_segment_whose_argument_is_no_tensor_is_computed_again_with_autocast():
    import torch

    assert run_ranks(segment_of_an_object, 0) == [[torch.bfloat16] * 2]
