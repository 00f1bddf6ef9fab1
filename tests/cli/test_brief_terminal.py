"""What ``mmdevplug train`` shows on the terminal, and what only the log file has."""

import sys

import pytest

from tests.cli.running import CONFIG, config, mmdevplug
from tests.commands import run


@pytest.mark.parametrize('words', [(), ('--verbose',)])
def test_the_terminal_shows_results_and_the_file_everything(tmp_path, words):
    done = run(
        *(sys.executable, '-m', 'mmdevplug', 'train', CONFIG, *words, '--work-dir', tmp_path),
        *('--cfg-options', 'train_cfg.max_epochs=2', 'train_cfg.val_interval=2'),
        *('default_hooks.logger.interval=100', 'optim_wrapper.paramwise_cfg.bias_lr_mult=2.0'),
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    (file,) = tmp_path.glob('*/*.log')
    whole = file.read_text()
    last = f'The last checkpoint is {tmp_path / "epoch_2.pth"}.'
    for text in ('device cpu (cpu)', 'Epoch(val) [2]', 'Saving checkpoint at 2 epochs', last):
        assert text in shown
    left_out = ('System environment', 'Config:', 'Hooks will be executed')
    for text in (*left_out, 'paramwise_options'):
        assert text in whole
        assert (text in shown) == bool(words)
    if not words:
        assert len(shown.splitlines()) <= 12
        assert str(file) in shown


#: A hook of the user that warns on all ranks, and on one.
WARNS = """
import os
import warnings
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class Warns(Hook):
    def before_train(self, runner):
        for _ in range(2):
            warnings.warn('on all ranks')
        if os.environ['RANK'] == '1':
            warnings.warn('on one rank')
"""


@pytest.mark.parametrize(('words', 'times'), [((), 1), (('--verbose',), 2)])
def test_a_warning_of_several_ranks_is_shown_once(tmp_path, words, times):
    (tmp_path / 'warns.py').write_text(WARNS)
    lines = "custom_hooks = [dict(type='Warns')]\ntrain_cfg = dict(max_epochs=1)"
    path = config(tmp_path, lines, ['warns'])
    words = ('--nproc', '2', *words, '--work-dir', tmp_path / 'work')
    done = mmdevplug(tmp_path, 'train', path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('UserWarning: on all ranks') == times
    assert done.stderr.count('UserWarning: on one rank') == 1
