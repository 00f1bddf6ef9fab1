"""The line that names the rank for which the others wait, in real jobs of two ranks."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.distributed.slow_rank import Slowest, find_slowest
from mmdevplug.hooks.communication_hook import CommunicationHook
from tests.jobs import PLAIN, train_digits
from tests.ranks import run_ranks


@HOOKS.register_module()
class Hindered(Hook):
    """Let one rank take longer to load a batch, or for what follows."""

    def __init__(self, rank, what):
        self.is_slow = os.environ['RANK'] == str(rank)
        self.what = what

    def before_train(self, runner):
        if self.is_slow and self.what == 'loading':
            collate = runner.train_dataloader.collate_fn

            def slow(samples):
                time.sleep(0.25)
                return collate(samples)

            runner.train_dataloader.collate_fn = slow

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.is_slow and self.what == 'computing':
            time.sleep(0.25)


def train(accelerator, work_dir, hindered):
    train_digits(
        accelerator,
        work_dir,
        **dict(PLAIN, train_cfg__max_epochs=1),
        custom_hooks=[
            dict(type='CommunicationHook', picture=False, compare_every=10),
            dict(type='Hindered', **hindered),
        ],
        default_hooks__logger__interval=1,
        log_processor=dict(window_size=1),
    )


@pytest.mark.parametrize(
    ('accelerator', 'rank', 'what'),
    [
        ('cpu', 0, 'loading'),
        ('cpu', 1, 'computing'),
        ('zeta', 0, 'computing'),
        ('zeta', 1, 'loading'),
        pytest.param('xla', 0, 'computing', marks=pytest.mark.xla),
        pytest.param('xla', 1, 'computing', marks=pytest.mark.xla),
    ],
)
def test_a_slow_rank_is_named_with_what_is_slow(accelerator, rank, what, tmp_path):
    run_ranks(train, 2, accelerator, tmp_path, dict(rank=rank, what=what))
    (log,) = tmp_path.glob('*/*.log')
    lines = log.read_text().splitlines()
    (named,) = [line for line in lines if 'is slow: it delays the others' in line]
    assert f'Last 10 iterations: rank {rank} on host {os.uname().nodename} ({accelerator}' in named
    assert ('train_dataloader.num_workers' in named) == (what == 'loading')
    (path,) = tmp_path.glob('*/vis_data/scalars.json')
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    (delay,) = [line['comm/slowest_ms'] for line in logged if 'comm/slowest_ms' in line]
    assert f'delays the others by {delay:.0f} ms' in named


def test_a_rank_is_named_again_only_after_another_or_none_was_slow():
    warned = []
    runner = SimpleNamespace(logger=SimpleNamespace(warning=warned.append))
    hook = CommunicationHook()
    for rank, slow in ((1, True), (1, True), (1, False), (1, True), (0, True)):
        hook._warn(runner, Slowest(rank, 50.0, slow, f'rank {rank}'))
    assert [line.rpartition(': ')[2] for line in warned] == ['rank 1', 'rank 1', 'rank 0']


def times(*ranks):
    names = ('iteration', 'waited', 'loading')
    return [dict(zip(names, each), host=f'host{i}', device='cpu') for i, each in enumerate(ranks)]


@pytest.mark.parametrize(
    ('ranks', 'rank', 'delay', 'slow'),
    [
        (times((100, 2, 1), (100, 2, 1)), 0, 0, False),
        (times((100, 60, 1), (100, 2, 1), (100, 62, 1)), 1, 59, True),
        (times((100, 12, 1), (100, 2, 1)), 1, 10, False),  # less than a fifth
        # Rank 0 sends the buffers: the others wait for these, and nobody waits for gradients.
        (times((100, 2, 70), (100, 2, 1), (100, 3, 1)), 0, 69, True),
        # Two of four are slow: each delays the two others.
        (times((100, 2, 1), (100, 3, 1), (100, 60, 1), (100, 60, 1)), 0, 58, True),
        (times((0, 0, 0), (0, 0, 0)), 0, 0, False),
    ],
)
def test_the_slowest_waits_least_or_loads_longest(ranks, rank, delay, slow):
    found = find_slowest(ranks)
    assert found.delay == delay
    assert found.slow == slow
    if slow:
        assert found.rank == rank
        assert f'rank {rank} on host host{rank} (cpu) is slow' in found.text
