"""Trainings in this process that are interrupted and resumed, compared with ones that are not."""

import itertools
import os
import re
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import base_dataset
from mmengine.dist import barrier
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from mmengine.runner import loops
from mmengine.visualization import Visualizer

from mmdevplug.checkpoint.participants import unpack
from mmdevplug.checkpoint.reading import read_checkpoint
from mmdevplug.hooks.preemption_hook import save_now
from mmdevplug.runner import DeviceRunner
from tests.checkpoint.test_round_trip import check_equal
from tests.checkpoint.training import config
from tests.jobs import note

#: Iterations of a training, 5 of which are an epoch.
LENGTH = 20
#: Where a training is interrupted. The first saves in the middle of an epoch, as a signal lets it
#: do; the second leaves the checkpoint that was saved at the end of the third epoch.
FIRST, SECOND = 8, 17

_numbers = itertools.count()


class Stop(Hook):
    """Ends training at the end of an iteration, all ranks alike."""

    priority = 'LOWEST'

    def __init__(self, iteration, save):
        self.iteration, self.save = iteration, save

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.iteration:
            if self.save:
                save_now(runner)
            raise SystemExit(0)


def _look(runner, batch_idx, data_batch, outputs):
    """Which samples, rates and losses an iteration has had."""
    samples = torch.as_tensor(data_batch['targets'])[:, 0].tolist()
    losses = {name: value.item() for name, value in outputs.items()}
    return runner.iter, (batch_idx, samples, str(runner.optim_wrapper.get_lr()), losses)


@contextmanager
def quickly():
    """Leave out what takes long in a start and changes nothing: reports, figures, pauses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRunner, '_log_env', lambda *_: None)
        patch.setattr(Config, 'pretty_text', property(repr))
        patch.setattr(Visualizer, '_initialize_fig', lambda *_: _one_figure())
        patch.setattr(base_dataset, 'gc', SimpleNamespace(collect=lambda: None))
        patch.setattr(loops, 'time', SimpleNamespace(sleep=lambda _: None))
        yield


_initialize_fig = Visualizer._initialize_fig


@lru_cache(maxsize=None)
def _one_figure():
    return _initialize_fig(None, dict(frameon=False))


def tiny(work_dir, by_epoch=True, **changes):
    """A config of the shortest training that has everything; see `tests.checkpoint.training`."""
    ranks = int(os.environ.get('WORLD_SIZE', 1))
    checkpoint = dict(interval=1 if by_epoch else 5, by_epoch=by_epoch, max_keep_ckpts=2)
    options = dict(
        length=LENGTH // 5 if by_epoch else LENGTH,
        checkpoint=checkpoint,
        train_dataloader__dataset=dict(type='NoisyDataset', indices=20 * ranks),
        val_dataloader__dataset=dict(type='NoisyDataset', indices=8),
        train_cfg__val_interval=2 if by_epoch else 10,
        default_hooks__logger=dict(type='LoggerHook', interval=3),
    )
    return config(work_dir, by_epoch=by_epoch, **{**options, **changes})


def start(work_dir, options, resume=False, stop=None):
    """Train, as if in a separate process.

    Returns:
        dict: What :func:`_look` has seen, by iteration.
    """
    cfg = tiny(work_dir, **options)
    # Its message hub, its logger: nothing is left of another run.
    cfg.update(experiment_name=f'run_{next(_numbers)}', resume=resume)
    if resume:
        cfg.pop('load_from', None)
    runner = RUNNERS.build(Config(cfg))
    seen = note(runner, 'after_train_iter', _look)
    if stop is not None:
        runner.register_hook(stop)
    try:
        runner.train()
    except SystemExit:
        assert stop is not None
    for loop in (runner.train_loop, runner.val_loop):
        endless = getattr(loop, 'dataloader_iterator', None)
        for iterator in (getattr(each, '_iterator', None) for each in (endless, loop.dataloader)):
            inner = getattr(iterator, '_inner', iterator)
            if hasattr(inner, '_shutdown_workers'):
                inner._shutdown_workers()
    return dict(seen)


def final_state(work_dir):
    """The last checkpoint, without what differs between any two runs."""
    path = Path((Path(work_dir) / 'last_checkpoint').read_text())
    state = read_checkpoint(str(path))
    for name in ('time', 'experiment_name', 'cfg', 'mmengine_version', 'job'):
        state['meta'].pop(name)
    exact = state['mmdevplug']
    exact['ranks'] = [unpack(packed, str(path)) for packed in exact['ranks']]
    hub = state['message_hub']
    for name in ('cfg', 'experiment_name', 'interrupted_ckpt', 'eta', 'mmengine_version'):
        hub['runtime_info'].pop(name, None)
        hub['resumed_keys'].pop(name, None)
    for name, value in list(hub['runtime_info'].items()):
        if isinstance(value, str):  # paths
            hub['runtime_info'][name] = value.replace(str(work_dir), '')
    measured = re.compile('time|memory|train/comm')
    for part in ('log_scalars', 'resumed_keys'):
        hub[part] = {k: v for k, v in sorted(hub[part].items()) if not measured.search(k)}
    hub['runtime_info'] = dict(sorted(hub['runtime_info'].items()))
    return path.name, state


def differences(folder, options, first=FIRST, second=SECOND):
    """Train once as a whole and once with two interruptions.

    Args:
        folder (Path): For the work directories.
        options (dict): Of :func:`tiny`.
        first (int): After which iteration to save and stop.
        second (int): After which to stop without saving.

    Returns:
        str or None: What differs first.
    """
    whole, cut = folder / 'whole', folder / 'cut'
    with quickly():
        expected = start(whole, options)
        barrier()
        got = start(cut, options, stop=Stop(first, save=True))
        got.update(start(cut, options, resume=True, stop=Stop(second, save=False)))
        got.update(start(cut, options, resume=True))
        barrier()
    if not expected:
        return 'nothing was trained'
    for iteration, seen in expected.items():
        for what, one, other in zip(
            ('batch index', 'samples', 'rates', 'losses'), seen, got.get(iteration, ())
        ):
            if one != other:
                return f'iteration {iteration}: {what} {other}, expected {one}'
    if got.keys() != expected.keys():
        return f'iterations {sorted(got)}, expected {sorted(expected)}'
    left = sorted(each.name for each in cut.glob('interrupted_*'))
    if left:
        return f'{left} outlived the next checkpoint'
    (name, one), (other_name, other) = final_state(whole), final_state(cut)
    try:
        assert name == other_name
        check_equal(other, one)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None
