"""MemoryHook on a lazy device: nothing more is run."""

import re

import pytest

from tests.hooks.memory_jobs import build, log_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.xla


def train_and_count(work_dir, options):
    """Train; return executions, compilations and the log."""
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    build(work_dir, 'xla', **options).train()
    xm.wait_device_ops()
    counts = [(metrics.metric_data(name) or [0])[0] for name in ('ExecuteTime', 'CompileTime')]
    return counts, log_of(work_dir)


def test_watching_runs_and_compiles_nothing(tmp_path):
    ((watched, log),) = run_ranks(train_and_count, 0, tmp_path / 'on', {})
    ((alone, _),) = run_ranks(train_and_count, 0, tmp_path / 'off', dict(memory=False))
    assert watched == alone
    assert watched[0] > 100
    (line,) = [line for line in log.splitlines() if '[100/140]' in line]
    assert re.search(r'host_memory: \d+', line)
