"""Dynamic sampling on lazy devices: graph executions, and the worked example on T20 cards."""

import sys

import pytest

from tests.ranks import run_ranks
from tests.runner.test_dynamic_sampling import example_config, train_example
from tests.xla.test_gcu_t20 import STANDIN

pytestmark = pytest.mark.xla

SHORT = dict(train_cfg__max_iters=14, train_cfg__val_interval=100)


def count_executions(work_dir):
    """Executions of each iteration, the rounds it drew, and compilations after warm-up."""
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics
    from mmengine.hooks import Hook
    from mmengine.registry import RUNNERS

    class Counts(Hook):
        priority = 'LOWEST'

        def __init__(self):
            self.seen = []

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            xm.wait_device_ops()  # executions are counted when they end
            found = [metrics.metric_data(name) for name in ('ExecuteTime', 'CompileTime')]
            assert data_batch['inputs'].device == next(runner.model.parameters()).device
            rounds = runner.train_loop.batches_drawn
            self.seen.append([rounds, *(data[0] if data else 0 for data in found)])

    cfg = example_config('dynamic_sampling_xla', work_dir, **SHORT)
    cfg.default_hooks.logger.interval = 5
    runner = RUNNERS.build(cfg)
    counts = Counts()
    runner.register_hook(counts)
    runner.train()
    warm = counts.seen[4:]
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in zip(warm, warm[1:])]
    return steps, warm[-1][2] - warm[0][2]


@pytest.mark.parametrize(('ranks', 'step'), [(0, 1), (2, 2)])
def test_one_execution_for_a_round_besides_those_of_the_step(tmp_path, ranks, step):
    for steps, compilations in run_ranks(
        count_executions, ranks, tmp_path, environ=dict(CPU_NUM_DEVICES='2')
    ):
        assert len(steps) == 9
        assert [executions - rounds for rounds, executions in steps] == [step] * 9
        assert compilations == 0
        assert len({rounds for rounds, _ in steps}) > 1  # or this would say little


def train_on_cards(work_dir):
    sys.path.insert(0, STANDIN)
    found = train_example('dynamic_sampling_gcu_t20_8x', work_dir, SHORT_WITH_TEST)
    import t20_card

    return found, t20_card.calls['unlazy']


#: The first part of a longer run.
SHORT_WITH_TEST = dict(
    train_cfg__max_iters=20, train_cfg__val_interval=20, param_scheduler__T_max=100
)


def test_eight_ranks_each_on_its_card(tmp_path):
    found = run_ranks(train_on_cards, 8, tmp_path, timeout=280)
    for rank, (result, unlazy) in enumerate(found):
        assert result['device'] == f'xla:{rank}'
        assert result['report'].slice == (64 * rank, 64 * (rank + 1))
        assert unlazy >= 20  # the card's own function has run
        assert result['accuracy'] >= 70.0
    assert len({result['report'].by_rank for result, _ in found}) == 1
