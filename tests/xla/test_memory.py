"""MemoryHook and LossCheckHook on a lazy device: nothing more is run."""

import re

import pytest

from tests.hooks.memory_jobs import build, log_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.xla

TWO = dict(CPU_NUM_DEVICES='2')


def train_and_count(work_dir, options):
    """Train; return executions, compilations and the log."""
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    build(work_dir, 'xla', **options).train()
    xm.wait_device_ops()
    counts = [(metrics.metric_data(name) or [0])[0] for name in ('ExecuteTime', 'CompileTime')]
    return counts, log_of(work_dir)


def test_watching_runs_and_compiles_nothing(tmp_path):
    often = dict(sample_interval=2, interval=3)
    ((watched, log),) = run_ranks(train_and_count, 0, tmp_path / 'on', dict(memory=often))
    ((alone, _),) = run_ranks(train_and_count, 0, tmp_path / 'off', dict(memory=False))
    assert watched == alone
    assert watched[0] > 100
    (line,) = [line for line in log.splitlines() if '[100/140]' in line]
    assert re.search(r'host_memory: \d+', line)


def test_a_loss_that_is_not_finite_stops_all_ranks(tmp_path):
    from tests.hooks.test_loss_check_hook import check_all_stop

    check_all_stop(tmp_path, 'xla', environ=TWO)


def test_checking_the_loss_runs_nothing(tmp_path):
    ((checked, _),) = run_ranks(train_and_count, 0, tmp_path / 'on', dict(on_nan='stop'))
    ((alone, _),) = run_ranks(train_and_count, 0, tmp_path / 'off', {})
    assert checked == alone
