"""Seeds: all generators of all ranks and workers, and samples that no two ranks share."""

import pytest

from tests.columns import XLA, job_of
from tests.ranks import run_ranks
from tests.runner.random_jobs import check, draw


@pytest.fixture(scope='module')
def on_the_cpu(tmp_path_factory):
    return run_ranks(draw, 3, str(tmp_path_factory.mktemp('cpu')), 'cpu')


def test_ranks_workers_and_samplers(on_the_cpu):
    check(on_the_cpu)


@pytest.mark.parametrize('accelerator', ['zeta', XLA])
def test_a_card_is_seeded_too(tmp_path, accelerator):
    ranks = run_ranks(draw, 2, str(tmp_path), accelerator, **job_of(accelerator))
    check(ranks)
    if accelerator == 'zeta':
        assert all(each['told'] == each['seed'] for rank in ranks for each in rank)


def test_a_given_seed_draws_the_same_in_another_run(on_the_cpu, tmp_path):
    again = run_ranks(draw, 3, str(tmp_path), 'cpu')
    for one, other in zip(on_the_cpu, again):
        assert one[:2] == other[:2]
        assert one[2]['seed'] != other[2]['seed']
