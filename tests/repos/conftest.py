"""Models of a repository, trained once for all tests of a file: those of its `recipes`."""

import pytest

from tests.columns import job_of
from tests.ranks import run_ranks
from tests.repos.training import train_all


@pytest.fixture(scope='module')
def stock(recipes, tmp_path_factory):
    """What MMEngine's own runner found of each recipe, in one process on the CPU."""
    (found,) = run_ranks(train_all, 0, recipes, 'stock', tmp_path_factory.mktemp('stock'))
    return found


@pytest.fixture(scope='module')
def trained(recipes, tmp_path_factory):
    """For an accelerator, a number of ranks and the name of a recipe: what each rank found."""
    jobs = {}

    def of(case):
        if case not in jobs:
            accelerator, ranks, name = case
            folder = tmp_path_factory.mktemp('_'.join(map(str, case)))
            job = dict(job_of(accelerator, ranks), timeout=580)
            jobs[case] = run_ranks(
                train_all, ranks, {name: recipes[name]}, accelerator, folder, **job
            )
        return jobs[case]

    return of
