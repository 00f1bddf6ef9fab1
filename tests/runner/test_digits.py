"""The main job: the digits example trains, and equally, on every kind of device."""

import pytest

from tests.jobs import PLAIN, largest_difference, train_digits
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ('accelerator', 'ranks'), [('cpu', 0), ('cpu', 2), ('zeta', 0), ('zeta', 2)]
)
def test_accuracy(tmp_path, accelerator, ranks):
    results = run_ranks(train_digits, ranks, accelerator, tmp_path)
    assert results[0]['accuracy'] >= 97.0
    for rank, result in enumerate(results):
        assert result['device'] == (f'zeta:{rank}' if accelerator == 'zeta' else 'cpu')
        assert result['wrapper'] == (
            'DeviceDistributedDataParallel' if ranks else 'DigitsClassifier'
        )
        assert result['staged'] == (accelerator == 'zeta' and ranks > 0)


@pytest.fixture(scope='module')
def single_process_weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp('single')
    return _train_plain('cpu', folder, 0)[0]['weights']


def _train_plain(accelerator, folder, ranks):
    return run_ranks(train_plain_digits, ranks, accelerator, folder)


def train_plain_digits(accelerator, work_dir):
    """Two epochs of a model without batch normalization; the same global batches always."""
    return train_digits(accelerator, work_dir, **PLAIN)


@pytest.mark.parametrize(('accelerator', 'ranks'), [('cpu', 2), ('cpu', 4), ('zeta', 2)])
def test_weights_equal_those_of_one_process(tmp_path, single_process_weights, accelerator, ranks):
    results = _train_plain(accelerator, tmp_path, ranks)
    for result in results:
        assert largest_difference(result['weights'], single_process_weights) <= 1e-4


def test_ranks_end_with_equal_weights(tmp_path):
    first, second = _train_plain('zeta', tmp_path, 2)
    assert largest_difference(first['weights'], second['weights']) == 0.0
