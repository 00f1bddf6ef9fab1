"""The digits example trains on the stand-in, on the PyTorch that a T20 runs."""

import sys

import pytest
import torch

from tests.jobs import PLAIN, largest_difference, train_digits
from tests.ranks import run_ranks
from tests.t20.conftest import FOLDER, MISSING

pytestmark = [pytest.mark.t20, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

#: Iterations of an epoch, each with 128 samples of all ranks.
ITERATIONS = 11
#: Those of the validation after the last epoch.
VALIDATION_ITERATIONS = 6


def train(accelerator, work_dir, **options):
    """Train in a process that has the stand-in; return the results, executions and calls."""
    sys.path.insert(0, str(FOLDER))
    result = train_digits(accelerator, work_dir, **options)
    import t20_card

    index = torch.device(result['device']).index or 0
    result.update(t20_card.card.stats(index), calls=dict(t20_card.calls))
    return result


def train_plain(accelerator, work_dir):
    return train(accelerator, work_dir, **PLAIN)


@pytest.mark.parametrize('world_size', [0, 2])
def test_digits(torch_gcu, tmp_path, world_size):
    results = run_ranks(train, world_size, 'gcu', tmp_path)
    assert results[0]['accuracy'] >= 97.0
    for rank, result in enumerate(results):
        assert result['device'] == f'xla:{rank}'
        assert result['staged'] == bool(world_size)
        assert result['calls']['sync_lived_tensor'] > 0


@pytest.mark.parametrize('world_size', [0, 2])
def test_weights_are_those_of_the_host(torch_gcu, tmp_path, world_size):
    on_cards = run_ranks(train_plain, world_size, 'gcu', tmp_path / 'cards')
    (on_host,) = run_ranks(train_plain, 0, 'cpu', tmp_path / 'host')
    for result in on_cards:
        assert largest_difference(result['weights'], on_host['weights']) < 1e-4


def test_an_iteration_is_one_execution(torch_gcu, tmp_path):
    (result,) = run_ranks(train_plain, 0, 'gcu', tmp_path)
    iterations = ITERATIONS * PLAIN['train_cfg__max_epochs'] + VALIDATION_ITERATIONS
    # Nothing reads a value that is still to be computed: no `item`, no `copy to host`.
    assert set(result['executions']) <= {'sync_lived_tensor', 'unlazy'}
    assert sum(result['executions'].values()) <= iterations + 3
    assert result['compilations'] <= 6
