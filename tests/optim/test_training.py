"""Clipping, accumulation and mixed precision give the weights and the log of one process."""

import numpy as np
import pytest
import torch

from mmdevplug.optim.device_optim_wrapper import _clip_grad_norm_by_device
from tests.columns import NATIVE, amp_wrapper, job_of, on_xla, staged, within
from tests.jobs import largest_difference, needs_bfloat16
from tests.optim.scenarios import SCENARIOS, train, train_all
from tests.ranks import run_ranks


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
    (found,) = run_ranks(train_all, 0, 'cpu', tmp_path_factory.mktemp('single'))
    return found


JOBS = [('cpu', 2), ('zeta', 2), (NATIVE, 2), pytest.param(('cuda', 2), marks=pytest.mark.cuda)]
JOBS += [on_xla(case) for case in (('xla', 0), ('xla', 2), ('gcu', 2))]


@pytest.fixture(scope='module', params=JOBS, ids=lambda case: f'{case[0]}-{case[1]}')
def found(request, tmp_path_factory):
    accelerator, ranks = request.param
    folder, job = tmp_path_factory.mktemp(accelerator), job_of(accelerator, ranks)
    return accelerator, run_ranks(train_all, ranks, accelerator, folder, **job)


def test_scenarios_differ_from_each_other(expected):
    weights = [scenario['weights'] for scenario in expected.values()]
    for one, other in zip(weights, weights[1:]):
        assert largest_difference(one, other) > 1e-3


@pytest.mark.parametrize('scenario', SCENARIOS)
def test_weights_equal_those_of_one_process(expected, found, scenario):
    accelerator, ranks = found
    wrapper = 'DeviceOptimWrapper' if staged(accelerator) else 'OptimWrapper'
    for result in ranks:
        assert result[scenario]['wrapper'] == wrapper
        difference = largest_difference(result[scenario]['weights'], expected[scenario]['weights'])
        assert difference <= within(accelerator, 1e-5)


@needs_bfloat16
def test_bfloat16_comes_close_to_one_process_and_is_not_float32(expected, found):
    casted = expected['bfloat16']['weights']
    assert largest_difference(casted, expected['clip_by_norm']['weights']) > 1e-4
    accelerator, ranks = found
    for result in ranks:
        assert result['bfloat16']['wrapper'] == amp_wrapper(accelerator)
        # The CPU and a GPU round in other places.
        tolerance = 2e-2 if accelerator == 'cuda' else 5e-3
        difference = largest_difference(result['bfloat16']['weights'], casted)
        assert difference <= tolerance
        assert difference > 1e-5 or not staged(accelerator)


@pytest.mark.parametrize('scenario', [name for name in SCENARIOS if name != 'clip_by_value'])
def test_logged_norm_is_that_of_its_iteration(expected, found, scenario):
    accelerator, ranks = found
    first, *others = (result[scenario]['norms'] for result in ranks)
    if scenario == 'accumulation':
        assert first is None
        return
    assert len(first) == (6 if 'accumulation' in scenario else 22)
    np.testing.assert_allclose(
        first, expected[scenario]['norms'], rtol=10 * within(accelerator, 1e-5)
    )
    for other in others:
        np.testing.assert_array_equal(other, first)


def train_sharded(work_dir, optimizer):
    optim_wrapper = dict(optimizer=dict(optimizer, lr=0.01))
    options = dict(default_hooks__checkpoint__interval=1, train_cfg__max_epochs=1)
    first = train('cpu', work_dir, optim_wrapper, **options)
    # The state is collected from all ranks for the checkpoint, and shared out again.
    options['train_cfg__max_epochs'] = 2
    return first, train('cpu', work_dir, optim_wrapper, resume=True, **options)


def test_sharded_optimizer_equals_the_plain_one(tmp_path):
    sharded = dict(type='ZeroRedundancyOptimizer', optimizer_type='Adam')
    plain = run_ranks(train_sharded, 2, tmp_path / 'plain', dict(type='Adam'))
    for result, other in zip(run_ranks(train_sharded, 2, tmp_path / 'zero', sharded), plain):
        for one, two in zip(result, other):
            assert largest_difference(one['weights'], two['weights']) <= 1e-6
        assert largest_difference(result[0]['weights'], result[1]['weights']) > 1e-3


@pytest.mark.parametrize('max_norm', [0.1, 100.0])
def test_a_norm_over_several_devices_clips_as_pytorchs_does(max_norm):
    ours, theirs = ([torch.ones(3, requires_grad=True) for _ in range(2)] for _ in range(2))
    for number, parameter in enumerate([*ours, *theirs]):
        parameter.grad = torch.full((3,), 1.0 + number % 2)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(_clip_grad_norm_by_device(ours, max_norm), expected)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one.grad, other.grad)
