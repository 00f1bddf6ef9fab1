"""A training that compiles for long says what goes on."""

import pytest

from tests.jobs import train_digits
from tests.ranks import run_ranks

pytestmark = pytest.mark.xla


def train(folder):
    from mmdevplug.hooks import compilation_hook
    from mmdevplug.utils import progress

    lines = []
    progress.write_log = lines.append
    watches = []

    def watch(describe):
        watches.append(progress.SilenceWatch(describe, seconds=0.2))
        return watches[-1]

    compilation_hook.SilenceWatch = watch
    train_digits(
        'xla',
        folder,
        train_cfg__max_epochs=1,
        train_cfg__val_interval=100,
        default_hooks__logger=dict(type='LoggerHook', interval=1000),
    )
    return lines, [each._thread.is_alive() for each in watches]


def test_lines_until_the_first_of_the_log(tmp_path):
    ((lines, left),) = run_ranks(train, 0, tmp_path, environ=dict(CPU_NUM_DEVICES='1'))
    told = [line for line in lines if 'first line for' in line]
    assert told[0].startswith('Iteration 1 is running, 0 are done')
    assert 'graphs have been compiled so far' in told[0]
    assert left == [False]
