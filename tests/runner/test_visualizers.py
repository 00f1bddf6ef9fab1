"""What MMEngine's backends of visualizers write in a job of two ranks, and in a resumed one."""

import json

import pytest
from mmengine.registry import RUNNERS

from mmdevplug.cli import train
from tests.cli.running import DIGITS
from tests.ranks import run_ranks

CONFIG = f"""
_base_ = {DIGITS!r}
vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(type='Visualizer', vis_backends=vis_backends)
train_cfg = dict(max_epochs=2, val_interval=1)
default_hooks = dict(checkpoint=dict(interval=1), logger=dict(interval=5))
"""


def job(folder, *arguments):
    """Train in a rank; the files that this rank's visualizer has open."""
    words = [str(folder / 'config.py'), '--launcher', 'pytorch', '--work-dir', str(folder / 'out')]
    runner = RUNNERS.build(train.configure(train.build_parser().parse_args([*words, *arguments])))
    runner.train()
    return [backend._env_initialized for backend in runner.visualizer._vis_backends.values()]


def steps(folder):
    """The steps of losses and of validations, in each of the two files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    board = [[one.step for one in events.Scalars(name)] for name in ('loss', 'accuracy')]
    lines = [json.loads(line) for line in (folder / 'scalars.json').read_text().splitlines()]
    local = [[line['step'] for line in lines if name in line] for name in ('loss', 'accuracy')]
    assert board == local
    return board


@pytest.mark.long
def test_rank_0_writes_and_a_resumed_run_goes_on(tmp_path):
    pytest.importorskip('tensorboard')
    (tmp_path / 'config.py').write_text(CONFIG)
    assert run_ranks(job, 2, tmp_path) == [[True, True], [False, False]]
    (first,) = (tmp_path / 'out').glob('*/vis_data')
    assert len(list(first.glob('events.*'))) == 1
    more = ('--resume', '--cfg-options', 'train_cfg.max_epochs=4')
    assert run_ranks(job, 2, tmp_path, *more) == [[True, True], [False, False]]
    (second,) = set((tmp_path / 'out').glob('*/vis_data')) - {first}
    assert steps(first) == [[5, 10, 16, 21], [1, 2]]
    # The validation after the checkpoint is repeated.
    assert steps(second) == [[27, 32, 38, 43], [2, 3, 4]]
