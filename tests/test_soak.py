"""Thousands of iterations with logging and checkpoints in memory that does not grow."""

import psutil
import pytest
from mmengine.hooks import Hook

from tests.hooks.memory_jobs import build
from tests.ranks import run_ranks

ITERATIONS = 2000
#: Everything is allocated by then.
FROM = 300


class Resident(Hook):
    """Notes what this process holds, every 50 iterations."""

    priority = 'LOWEST'

    def __init__(self):
        self.figures = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if (runner.iter + 1) % 50 == 0:
            self.figures[runner.iter + 1] = psutil.Process().memory_info().rss


def soak(work_dir, accelerator):
    runner = build(work_dir, accelerator, iterations=ITERATIONS, checkpoint_interval=500)
    resident = Resident()
    runner.register_hook(resident)
    runner.train()
    return resident.figures


def check(ranks):
    for rank, figures in enumerate(ranks):
        megabytes = {iteration: round(size / 2**20, 1) for iteration, size in figures.items()}
        print(f'rank {rank}, MB at iteration: {megabytes}')
        last = max(size for iteration, size in figures.items() if iteration > ITERATIONS - 250)
        growth = last / figures[FROM] - 1
        print(f'rank {rank}: {growth:+.2%} from iteration {FROM} to {ITERATIONS}')
        assert abs(growth) < 0.02


def test_two_ranks_on_the_cpu(tmp_path):
    check(run_ranks(soak, 2, tmp_path, 'cpu'))
    assert sorted(path.name for path in tmp_path.glob('iter_*.pth')) == [
        f'iter_{iteration}.pth' for iteration in (1000, 1500, 2000, 500)
    ]


@pytest.mark.xla
def test_two_ranks_on_xla(tmp_path):
    check(run_ranks(soak, 2, tmp_path, 'xla', environ=dict(CPU_NUM_DEVICES='2')))
