"""``compile`` of MMEngine's configs, with PyTorch's own compiler."""

import shutil

import pytest

from tests.features.rows import row_config
from tests.jobs import largest_difference, torch_before, weights_of
from tests.ranks import run_ranks


def train_compiled(compile_cfg, work_dir):
    from torch._dynamo import trace_rules
    from torch._dynamo.utils import counters

    # As where the environment lies in a checkout of this project: PyTorch names the files of the
    # standard library that it skips, and 'mmdevplug' is in each of them.
    trace_rules.SKIP_DIRS.append('/home/somebody/mmdevplug/.venv/lib/python3/abc.py')

    from mmdevplug.runner import DeviceRunner
    from tests.features import parts  # noqa: F401

    cfg = row_config('sgd', 'cpu', work_dir)
    cfg.compile = compile_cfg
    runner = DeviceRunner.from_cfg(cfg)
    runner.train()
    model = getattr(runner.model, 'module', runner.model)
    return weights_of(model), counters['stats']['unique_graphs'], sorted(counters['graph_break'])


@pytest.mark.skipif(
    torch_before('2.4.0'), reason="the compiler of PyTorch 2.1 fails in PyTorch's own SGD"
)
@pytest.mark.skipif(shutil.which('gcc') is None, reason='inductor needs a C++ compiler')
def test_two_compiled_ranks_equal_one_process(tmp_path):
    ((expected, graphs, _),) = run_ranks(train_compiled, 0, False, tmp_path / 'one')
    assert graphs == 0
    for weights, graphs, breaks in run_ranks(
        train_compiled, 2, True, tmp_path / 'two', timeout=280
    ):
        assert graphs > 0
        assert largest_difference(weights, expected) <= 1e-5
        # Of the averaging: MMEngine's own reasons are backward() and reading the losses.
        assert not [text for text in breaks if 'GradBucket' in text or 'collective' in text]
