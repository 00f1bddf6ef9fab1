"""MemoryHook on a lazy device: nothing more is run."""

import re

import pytest

from tests.hooks.memory_jobs import build
from tests.jobs import log_of
from tests.ranks import run_ranks
from tests.xla.executions import counts

pytestmark = pytest.mark.xla


def train_and_count(work_dir, options):
    """Train; return executions, compilations and the log."""
    build(work_dir, 'xla', **options).train()
    return counts(), log_of(work_dir)


def test_watching_runs_and_compiles_nothing(tmp_path):
    ((watched, log),) = run_ranks(train_and_count, 0, tmp_path / 'on', {})
    ((alone, _),) = run_ranks(train_and_count, 0, tmp_path / 'off', dict(memory=False))
    assert watched == alone
    assert watched[0] > 100
    (line,) = [line for line in log.splitlines() if '[100/140]' in line]
    assert re.search(r'host_memory: \d+', line)
