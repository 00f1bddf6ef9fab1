"""Seeds on a lazy device."""

import pytest

from tests.ranks import run_ranks
from tests.runner.random_jobs import check, draw

pytestmark = pytest.mark.xla


def test_ranks_workers_and_samplers(tmp_path):
    environ = dict(CPU_NUM_DEVICES='2')
    check(run_ranks(draw, 2, str(tmp_path), 'xla', environ=environ))
