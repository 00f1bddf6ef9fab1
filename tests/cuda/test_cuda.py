"""A GPU, for two ranks over gloo or one over nccl: ``pytest -m cuda``."""

import pytest

from tests.distributed import run_ranks
from tests.jobs import PLAIN, largest_difference, train_digits
from tests.model.parity import SCENARIOS, compare_all

pytestmark = pytest.mark.cuda

#: A GPU's kernels round differently from the CPU's, more so in half precision.
TOLERANCE = {'mixed_dtypes': 5e-2}


@pytest.fixture(scope='module')
def differences():
    # Two ranks share a single GPU, which gloo allows.
    return run_ranks(compare_all, 2, 'cuda', environ=dict(CUDA_VISIBLE_DEVICES='0'))


@pytest.mark.parametrize('scenario', SCENARIOS)
def test_trains_as_ddp_on_the_cpu(differences, scenario):
    for found in differences:
        assert found[scenario] <= TOLERANCE.get(scenario, 1e-4)


@pytest.mark.parametrize('ranks', [0, 1])
def test_accuracy(tmp_path, ranks):
    (result,) = run_ranks(train_digits, ranks, 'cuda', tmp_path)
    assert result['accuracy'] >= 97.0
    assert result['device'] == 'cuda:0'
    assert not result['staged']


def train_plain(accelerator, work_dir):
    return train_digits(accelerator, work_dir, **PLAIN)


def test_weights_equal_those_of_one_process_on_the_cpu(tmp_path):
    (expected,) = run_ranks(train_plain, 0, 'cpu', tmp_path / 'cpu')
    (result,) = run_ranks(train_plain, 1, 'cuda', tmp_path / 'cuda')
    assert largest_difference(result['weights'], expected['weights']) <= 1e-4
