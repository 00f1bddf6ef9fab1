"""MemoryHook and LossCheckHook on a lazy device: leaks are named, and nothing more is run."""

import re

import pytest

from tests.hooks.memory_jobs import SOON, build, log_of, warnings_of
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


def test_a_list_of_tensors_is_named(tmp_path):
    options = dict(hooks=[dict(type='KeepTensors')], memory=SOON)
    ((_, log),) = run_ranks(train_and_count, 0, tmp_path, options)
    first = warnings_of(log)[0]
    assert 'host memory rose by' in first  # where PJRT's CPU client keeps its devices
    assert re.search(r'iteration \d+: Tensor \(300, 300\) float32: \+5 objects, \+1.7 MB', first)


def test_losses_kept_with_their_graph_are_named(tmp_path):
    options = dict(hooks=[dict(type='KeepLosses')], model=dict(hidden=512), memory=SOON)
    ((_, log),) = run_ranks(train_and_count, 0, tmp_path, options)
    warnings = warnings_of(log)
    assert any('Tensor () float32 with its graph: +5 objects' in warning for warning in warnings)


def test_watching_runs_and_compiles_nothing(tmp_path):
    often = dict(sample_interval=2, interval=3, warmup=5, growth_mb=0)
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
