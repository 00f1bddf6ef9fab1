"""Losses of all ranks in the log."""

import json

import pytest
from mmengine.dist import get_rank
from mmengine.logging import MessageHub

from mmdevplug.errors import DevPlugError
from mmdevplug.runner.device_log_processor import DeviceLogProcessor, _average
from tests.columns import LAZY
from tests.jobs import start, train_digits
from tests.ranks import in_ranks, run_ranks

WINDOW = 4


def train(accelerator, work_dir, average):
    """Train, and tell this rank's own losses and what the log says of them."""
    train_digits(
        accelerator,
        work_dir,
        train_cfg__max_epochs=1,
        train_cfg__val_interval=100,
        default_hooks__logger=dict(type='LoggerHook', interval=WINDOW),
        log_processor=dict(window_size=WINDOW, average_losses=average),
    )
    losses = MessageHub.get_current_instance().log_scalars['train/loss'].data[0]
    files = sorted(work_dir.glob('*/vis_data/scalars.json'))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [float(loss) for loss in losses], [line for line in lines if 'loss' in line]


@pytest.mark.parametrize('accelerator', ['cpu', LAZY])
@pytest.mark.parametrize('average', [False, True])
def test_the_log_has_the_mean_of_all_ranks(tmp_path, accelerator, average):
    ranks = run_ranks(train, 2, accelerator, tmp_path, average)
    logged = next(lines for _, lines in ranks if lines)
    averaged = [losses for losses, _ in ranks] if average else [ranks[0][0]]
    assert ranks[0][0] != ranks[1][0]
    assert len(logged) >= 2
    for line in logged:
        windows = [losses[line['step'] - WINDOW : line['step']] for losses in averaged]
        expected = sum(sum(window) / WINDOW for window in windows) / len(windows)
        assert line['loss'] == pytest.approx(expected, abs=1e-6)


@in_ranks(2)
def test_a_loss_that_a_rank_lacks_is_the_mean_of_the_others():
    start('cpu')
    if get_rank() == 0:
        assert _average(dict(loss=4.0, loss_of_masks=2.0)) == dict(loss=5.0, loss_of_masks=2.0)
    else:
        assert _average(dict(loss=6.0)) == dict(loss=5.0)


def test_another_value_is_refused():
    with pytest.raises(DevPlugError, match=r"average_losses='yes': expected True or False"):
        DeviceLogProcessor(average_losses='yes')
