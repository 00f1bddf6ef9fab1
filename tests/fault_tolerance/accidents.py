"""What goes wrong in the jobs of tests: a hook for a rank that dies, hangs or is asked to stop."""

import os
import signal
import time
from pathlib import Path

from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class Accident(Hook):
    """After an iteration something happens to one rank.

    Args:
        what (str): ``'kill'``, ``'hang'``, ``'raise'``, or the name of a signal.
        rank (int): To whom.
        iteration (int): After which iteration.
        note (str, optional): A folder where each rank leaves a file after each iteration.
        pause (float): Seconds that each iteration takes longer.
        when (str): ``'train'``, ``'test'``, where each iteration takes a minute, or the name of
            another moment, in which it happens the first time.
    """

    priority = 'VERY_LOW'

    def __init__(self, what='', rank=1, iteration=7, note=None, pause=0.0, when='train'):
        self.what, self.iteration = what, iteration
        self.mine = int(os.environ.get('RANK', 0)) == rank
        self.note, self.pause, self.when = note, pause, when

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        time.sleep(self.pause)
        done = runner.iter + 1
        self.write_note(done)
        if self.mine and self.when == 'train' and done == self.iteration:
            self.happen()

    def before_save_checkpoint(self, runner, checkpoint):
        if self.mine and self.when == 'before_save_checkpoint':
            self.happen()

    def after_run(self, runner):
        if self.mine and self.when == 'after_run':
            self.happen()

    def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.when == 'test':
            self.write_note(batch_idx + 1)
            time.sleep(60)

    def write_note(self, done):
        if self.note is not None:
            Path(self.note, os.environ.get('RANK', '0')).write_text(f'{os.getpid()} {done}')

    def happen(self):
        if self.what == 'kill':
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == 'hang':
            time.sleep(3600)
        elif self.what == 'raise':
            raise ValueError('the seventh batch is bad')
        elif self.what:
            os.kill(os.getpid(), getattr(signal, self.what))


@HOOKS.register_module()
class OwnCheckpointHook(CheckpointHook):
    """A repository's own, which ours does not replace."""
