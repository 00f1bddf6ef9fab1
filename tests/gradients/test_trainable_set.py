"""Parameters that begin or cease to be trained after the model was wrapped."""

from functools import lru_cache

import pytest
import torch
from mmengine.optim import OptimWrapper
from torch import nn

from mmdevplug.errors import ModelError
from mmdevplug.fault_tolerance import failure
from mmdevplug.gradients import trainable_set
from mmdevplug.gradients.trainable_set import TrainableSet, check_optimizers
from tests.columns import LAZY, NATIVE, job_of, lazy
from tests.gradients.averaging import rank, wrap
from tests.gradients.trainable import SCENARIOS, in_one_process, on_ranks
from tests.jobs import largest_difference, start
from tests.ranks import errors_of_ranks, in_ranks, run_ranks

CASES = [('cpu', 1), ('cpu', 2), ('cpu', 4), ('zeta', 2), (NATIVE, 2)]
CASES += [lazy(('lazy', 2))]
CASES += [pytest.param(('xla', 2), marks=pytest.mark.xla)]
CASES += [pytest.param(('cuda', ranks), marks=pytest.mark.cuda) for ranks in (1, 2)]


@lru_cache(maxsize=None)
def trained(accelerator, ranks):
    return run_ranks(on_ranks, ranks, accelerator, **job_of(accelerator, ranks))


@pytest.mark.parametrize('scenario', SCENARIOS)
@pytest.mark.parametrize('case', CASES, ids=lambda case: f'{case[0]}-{case[1]}')
def test_trains_as_one_process(case, scenario):
    found = [of_rank[scenario] for of_rank in trained(*case)]
    for weights, _ in found[1:]:
        assert largest_difference(weights, found[0][0]) == 0
    # The first gradient is a sum over 120,000 units in the case of shared memory.
    tolerance = 1e-4 if case[0] in ('cuda', 'xla') else 1e-5
    assert largest_difference(found[0][0], in_one_process(scenario, case[1])) <= tolerance


def test_halves_that_are_frozen_in_turns_restart_nothing():
    for accelerator in ('cpu', 'zeta'):
        found = [of_rank['take_turns_unused'][1] for of_rank in trained(accelerator, 2)]
        assert found == [0, 0]
    assert trained('cpu', 2)[0]['unfreeze'][1] == 1


@in_ranks(2)
def test_what_was_set_on_the_wrapper_stays():
    start('cpu')
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    wrapper = wrap(net, detect_anomalous_params=True).eval()
    called = []
    wrapper.register_forward_hook(lambda *_: called.append(1))
    net[0].requires_grad_(True)
    with wrapper.no_sync():
        wrapper(torch.full((2, 4), float(rank()))).sum().backward()
    assert wrapper.detect_anomalous_params
    assert not wrapper.training
    assert called == [1]
    # Inside no_sync each rank has gradients of its own batch, and that of rank 0 is zero.
    assert (net[0].weight.grad.abs().sum() > 0) == (rank() == 1)


@in_ranks(2)
def test_ranks_that_change_other_parameters_end_with_their_names():
    """Rank 1 unfreezes another layer than rank 0."""
    start('cpu')
    torch.manual_seed(0)
    wrapper = wrap(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).requires_grad_(True))
    wrapper.module[rank()].requires_grad_(False)
    expected = r'rank 1: has parameter 0\.weight \(4x4 torch\.float32\) where rank 0 has'
    with pytest.raises(ModelError, match=expected):
        wrapper(torch.ones(2, 4)).sum().backward()


def unfreeze_on_one_rank():
    start('cpu', timeout=8)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    wrapper = wrap(net)
    failure.enter_phase('train: iteration 5')
    net[0].requires_grad_(rank() == 1)
    with failure.fail_together('training'):
        wrapper(torch.ones(2, 4)).sum().backward()


def test_a_rank_that_changes_alone_ends_the_job_with_its_place():
    kind, message = errors_of_ranks(unfreeze_on_one_rank, 2)[1]
    assert kind == 'RankFailedError'
    assert 'comparing the parameters that are trained' in message
    assert "in 'train: iteration 5'" in message


def test_optimized_parameters_outside_of_the_model_are_refused():
    net = nn.Linear(4, 2)
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    averaged = TrainableSet(net, tolerates_unused=False)
    check_optimizers(net, [averaged], optim_wrapper)
    optim_wrapper.optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(7, 3))]))
    expected = r'1 parameter\(s\) that are not part of Linear, of shape \(7, 3\)'
    with pytest.raises(ModelError, match=expected):
        check_optimizers(net, [averaged], optim_wrapper)


def test_new_parameters_that_no_optimizer_holds_are_named(monkeypatch):
    warnings = []
    monkeypatch.setattr(trainable_set, 'log_warning', warnings.append)
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    optim_wrapper = OptimWrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    before = TrainableSet(net, tolerates_unused=False)
    check_optimizers(net, [before], optim_wrapper)
    net[1] = nn.Linear(2, 2)
    assert before.has_changed()
    after = TrainableSet(net, False, before)
    assert after.describe_change(before) == 'now 1.weight, 1.bias; no longer 1.weight, 1.bias'
    check_optimizers(net, [after], optim_wrapper)
    assert 'No optimizer holds 1.weight, 1.bias' in warnings[0]
    assert '2 parameter(s) that are no longer part of Sequential' in warnings[1]


@pytest.mark.parametrize('accelerator', ['zeta', LAZY])
@in_ranks(2)
def test_each_rank_keeps_its_buffers_when_averaging_begins_anew(accelerator):
    context = start(accelerator)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[0].requires_grad_(False)
    wrapper = wrap(net).eval()
    net[1].running_mean.fill_(rank() + 1.0)
    net[0].requires_grad_(True)
    wrapper(torch.ones(2, 4, device=context.device)).sum().backward()
    assert net[1].running_mean.tolist() == [rank() + 1.0] * 4
    assert net[0].weight.grad is not None
