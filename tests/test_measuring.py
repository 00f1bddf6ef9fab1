"""What ``make coverage`` counts: the lines of ranks, and those that backward calls among them."""

import inspect

import pytest

from mmdevplug.gradients import ddp_hook
from tests.jobs import ROOT, need_card, train_digits
from tests.measuring import SETTINGS
from tests.ranks import run_ranks


def test_lines_that_backward_runs_in_threads_of_pytorch_are_counted(tmp_path):
    need_card()
    coverage = pytest.importorskip('coverage')
    counted = tmp_path / '.coverage'
    variables = {SETTINGS: str(ROOT / 'pyproject.toml'), 'COVERAGE_FILE': str(counted)}
    run_ranks(train_digits, 2, 'zeta', str(tmp_path / 'job'), environ=variables)
    lines = coverage.CoverageData(basename=str(counted))
    for each in tmp_path.glob('.coverage.*'):
        of_rank = coverage.CoverageData(basename=str(each))
        of_rank.read()
        lines.update(of_rank)
    source, first = inspect.getsourcelines(ddp_hook.BucketAveraging.hook)
    inside = range(first + 1, first + len(source))
    assert {*inside} & {*lines.lines(ddp_hook.__file__)}
