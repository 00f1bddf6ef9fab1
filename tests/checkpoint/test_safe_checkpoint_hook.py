"""SafeCheckpointHook in the place of MMEngine's own."""

import itertools
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from mmdevplug import registry
from mmdevplug.checkpoint import writing
from mmdevplug.checkpoint.reading import check_file, read_checkpoint
from mmdevplug.errors import CheckpointError
from mmdevplug.hooks.safe_checkpoint_hook import SafeCheckpointHook
from mmdevplug.runner import DeviceRunner
from tests.checkpoint.training import build, config, train
from tests.jobs import largest_difference, log_of, needs_safe_loading, note, trained_weights
from tests.ranks import RanksFailed, check_errors, errors_of_ranks, in_ranks, run_ranks


def names_in(folder):
    return sorted(path.name for path in folder.glob('*.pth'))


#: Epochs of five iterations.
SMALL = dict(
    train_dataloader__dataset=dict(type='NoisyDataset', indices=20),
    val_dataloader__dataset=dict(type='NoisyDataset', indices=8),
)
OPTIONS = [
    dict(interval=1),
    dict(interval=2, max_keep_ckpts=1),
    dict(interval=1, max_keep_ckpts=2, save_best='auto', rule='less'),
    dict(interval=1, max_keep_ckpts=1, save_best=['loss_error'], rule='greater', save_last=False),
    dict(interval=1, max_keep_ckpts=1, save_best=['loss_error', 'most_error'], rule='less'),
    dict(interval=5, by_epoch=False, max_keep_ckpts=3),
    dict(interval=1, save_begin=3, save_optimizer=False),
    dict(interval=2, filename_tmpl='state_{}.pth', save_param_scheduler=False),
    dict(interval=1, max_keep_ckpts=1, published_keys=['meta', 'state_dict']),
]


@pytest.mark.parametrize('options', OPTIONS, ids=str)
@in_ranks()
def test_the_same_files_as_mmengines(tmp_path, options):
    """The files and what the message hub knows, with MMEngine's hook and with ours."""
    os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'  # MMEngine's way to publish needs it
    registry.REPLACED.pop('mmengine.hooks.checkpoint_hook.CheckpointHook')
    found = []
    for kind in ('CheckpointHook', 'SafeCheckpointHook'):
        folder = tmp_path / kind
        # By default it is the time in seconds, and runs of the same name share what they know.
        name = f'{tmp_path.name}_{kind}'
        checkpoint = dict(options, type=kind)
        runner = build(folder, experiment_name=name, default_hooks__checkpoint=checkpoint, **SMALL)
        assert any(type(hook).__name__ == kind for hook in runner.hooks)
        runner.train()
        info = runner.message_hub.runtime_info
        known = {name: str(info[name]) for name in info if 'ckpt' in name or 'best' in name}
        newest = known['pointer'] = (folder / 'last_checkpoint').read_text()
        info = read_checkpoint(newest)['message_hub']['runtime_info']
        known.update({f'saved {name}': str(info[name]) for name in info if 'best' in name})
        known = {name: text.replace(str(folder), '') for name, text in known.items()}
        found.append((sorted(name.split('-')[0] for name in names_in(folder)), known))
    stock, ours = found
    assert ours == stock


@in_ranks()
def test_mmengines_hook_is_replaced(tmp_path):
    kinds = []
    cfg = config(tmp_path)
    cfg['accelerator'] = dict(type='cpu')
    for hooks in (dict(checkpoint=dict(type='CheckpointHook', interval=1)), {}):
        cfg['default_hooks'].pop('checkpoint', None)
        cfg['default_hooks'].update(hooks)
        runner = DeviceRunner.from_cfg(Config(cfg))
        kinds += [type(h).__name__ for h in runner.hooks if isinstance(h, CheckpointHook)]
    assert kinds == ['SafeCheckpointHook', 'SafeCheckpointHook']


# failures ---------------------------------------------------------------------------------------


@HOOKS.register_module(force=True)
class FullDisk(Hook):
    """From the third checkpoint on no write succeeds."""

    def before_train(self, runner):
        count, save = itertools.count(1), torch.save

        def failing(value, path, *args, **kwargs):
            if writing.UNFINISHED in str(path) and next(count) >= 3:
                path.write(b'half')
                raise OSError(28, 'No space left on device')
            return save(value, path, *args, **kwargs)

        torch.save = failing


def train_on_full_disk(work_dir, checkpoint):
    hooks = [dict(type='FullDisk')]
    train(work_dir, by_epoch=False, checkpoint=checkpoint, custom_hooks=hooks)


@pytest.mark.parametrize('async_save', [False, True])
def test_no_room_ends_all_ranks_and_keeps_what_there_was(tmp_path, async_save):
    checkpoint = dict(interval=6, by_epoch=False, max_keep_ckpts=2, async_save=async_save)
    errors = errors_of_ranks(train_on_full_disk, 3, tmp_path, checkpoint)
    assert sorted(errors) == [0, 1, 2]
    full = 'No space left on device'
    check_errors({0: errors.pop(0)}, 'CheckpointError', full, 'iter_18.pth')
    check_errors(errors, 'RankFailedError', full, 'rank 0 of 3')
    assert names_in(tmp_path) == ['iter_12.pth', 'iter_6.pth']
    assert (tmp_path / 'last_checkpoint').read_text().endswith('iter_12.pth')
    for name in names_in(tmp_path):
        check_file(tmp_path / name)
    assert not list(tmp_path.glob(f'*{writing.UNFINISHED}*'))


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (dict(on_error='stop'), "default_hooks.checkpoint has no option 'on_error'"),
        (dict(timeout='stop'), "default_hooks.checkpoint has no option 'timeout'"),
        (dict(async_saves=True), "'async_saves'; did you mean 'async_save'?"),
        (dict(interval=1, max_keep_ckpt=3), "'max_keep_ckpt'; did you mean 'max_keep_ckpts'?"),
        (dict(async_save=2), 'checkpoint.async_save=2: expected True or False'),
    ],
    ids=['on_error', 'timeout', 'async_saves', 'max_keep_ckpt', 'no flag'],
)
def test_an_option_that_there_is_not_is_refused_with_the_nearest(options, said):
    runner = SimpleNamespace(save_checkpoint=Runner.save_checkpoint, hooks=[])
    with pytest.raises(CheckpointError, match=re.escape(said)):
        SafeCheckpointHook(**options).before_run(runner)


def test_an_unknown_option_ends_the_run(tmp_path):
    with pytest.raises(RanksFailed, match="default_hooks.checkpoint has no option 'async_saves'"):
        run_ranks(partial(train, checkpoint=dict(interval=1, async_saves=True)), 0, tmp_path)


class OwnSave:
    """A runner with its own way to save."""

    def __init__(self, work_dir):
        self.work_dir, self.given, self.hooks = str(work_dir), [], []

    def save_checkpoint(self, out_dir, filename, shards=1, **options):
        self.given.append(shards)
        (Path(out_dir) / filename).write_text('saved')


class StrictOwnSave(OwnSave):
    def save_checkpoint(
        self, out_dir, filename, meta, backend_args, save_optimizer, save_param_scheduler,
        by_epoch, shards=1,
    ):  # fmt: skip
        super().save_checkpoint(out_dir, filename, shards)


@pytest.mark.parametrize('kind', [OwnSave, StrictOwnSave])
def test_other_options_go_to_a_runner_that_takes_them(tmp_path, kind):
    runner, hook = kind(tmp_path), SafeCheckpointHook(shards=3)
    hook.before_run(runner)
    hook._save(runner, str(tmp_path / 'a.pth'), [], {})
    assert runner.given == [3]
    assert (tmp_path / 'a.pth').read_text() == 'saved'
    if kind is StrictOwnSave:
        with pytest.raises(CheckpointError, match="'shard'; did you mean 'shards'\\?"):
            SafeCheckpointHook(shard=3).before_run(runner)


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path):
    run_ranks(train, 0, tmp_path / 'first', timeout=100)
    path = tmp_path / 'first' / 'epoch_4.pth'
    os.truncate(path, os.path.getsize(path) // 2)
    resumed = partial(train, resume=True, load_from=str(path))
    errors = errors_of_ranks(resumed, 2, tmp_path / 'second')
    assert 'rank 0 of 2' in errors.pop(1)[1]
    check_errors(errors, 'CheckpointError', str(path))


def test_a_newest_file_that_is_damaged_costs_one_interval(tmp_path):
    whole = run_ranks(train, 2, tmp_path)
    path = tmp_path / 'epoch_4.pth'
    os.truncate(path, os.path.getsize(path) // 3)
    again = run_ranks(partial(train, resume=True), 2, tmp_path)
    assert largest_difference(whole[0]['weights'], again[0]['weights']) == 0.0
    logs = ''.join(log.read_text() for log in tmp_path.glob('*/*.log'))
    assert f'Cannot resume: {path}' in logs
    # Of log values that are not saved.
    assert 'is not defined in message_hub' not in logs


def resume_where_each_host_has_its_own(folder):
    os.chdir(os.path.join(folder, os.environ['RANK']))
    return train(folder, resume=True, load_from='epoch_4.pth')


def test_a_checkpoint_that_only_one_host_has(tmp_path):
    """A path means another folder for each rank, as on hosts without a common file system."""
    for rank in '01':
        (tmp_path / rank).mkdir()
    run_ranks(train, 0, tmp_path / '0', timeout=100)
    errors = errors_of_ranks(resume_where_each_host_has_its_own, 2, str(tmp_path))
    kind, message = errors[1]
    assert kind == 'CheckpointError'
    assert message.startswith('rank 0 resumes from epoch_4.pth, which is not there for rank 1')
    assert 'rank 1 of 2' in errors[0][1]


# other runners and files ------------------------------------------------------------------------


def stock(work_dir, resume):
    os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'  # MMEngine's own files need it as well
    cfg = config(work_dir)
    for key in ('runner_type', 'accelerator'):
        cfg.pop(key)
    cfg['default_hooks']['checkpoint'] = dict(type='CheckpointHook', interval=1)
    cfg['resume'] = resume
    cfg['env_cfg'] = dict(dist_cfg=dict(backend='gloo'))
    runner = Runner.from_cfg(Config(cfg))
    start = note(runner, 'before_train_epoch', lambda runner: runner.epoch)
    runner.train()
    return start, trained_weights(runner)


def test_stock_mmengine_resumes_from_ours_and_we_from_its(tmp_path):
    ((_, expected),) = run_ranks(stock, 0, tmp_path / 'stock', False)
    ours = run_ranks(train, 0, tmp_path / 'ours')[0]
    # One run of each starts with the same random numbers and sees the same batches.
    assert largest_difference(ours['weights'], expected) == 0.0
    for folder in (tmp_path / 'ours', tmp_path / 'stock'):
        (folder / 'epoch_4.pth').unlink()
        (folder / 'last_checkpoint').write_text(str(folder / 'epoch_3.pth'))
    ((start, _),) = run_ranks(stock, 0, tmp_path / 'ours', True)
    assert start == [3]
    (found,) = run_ranks(partial(train, resume=True), 0, tmp_path / 'stock')
    assert found['iter'] == 52


def test_states_of_another_format_are_refused(tmp_path):
    run_ranks(train, 0, tmp_path)
    path = tmp_path / 'epoch_4.pth'
    checkpoint = read_checkpoint(str(path))
    checkpoint['mmdevplug'] = dict(version=1, epoch=4, batch=-1, ranks=[{}], world_size=1)
    torch.save(checkpoint, path)
    resumed = partial(train, resume=True, load_from=str(path))
    errors = errors_of_ranks(resumed, 0, tmp_path / 'second')
    written = f'{path} was written by mmdevplug 0.1.0 with states of version 1'
    check_errors(errors, 'CheckpointError', written, 'expected version 4')
    # Its weights are taken all the same.
    run_ranks(partial(train, load_from=str(path)), 0, tmp_path / 'third')


class Box:
    def __init__(self):
        self.size = 3


def read_with_box(path, trusted):
    from mmdevplug.patches.torch_load import trust_classes

    trust_classes(trusted)
    return type(read_checkpoint(path)['box']).__name__


@needs_safe_loading
def test_a_class_that_the_user_trusts(tmp_path):
    path = str(tmp_path / 'a.pth')
    torch.save(dict(box=Box()), path)
    name = f'{Box.__module__}.Box'
    errors = errors_of_ranks(read_with_box, 0, path, [])
    assert f"checkpoint_classes=['{name}']" in errors[0][1]
    assert run_ranks(read_with_box, 0, path, [name]) == ['Box']
    for wrong in ('os.mkdir', 'nowhere.Box', 'nowhere', 3):
        with pytest.raises(RanksFailed, match='checkpoint_classes='):
            run_ranks(read_with_box, 0, path, [wrong])


def test_nothing_is_left_of_killed_writers(tmp_path):
    for name in ('epoch_1.pth', 'last_checkpoint'):
        (tmp_path / f'{name}{writing.UNFINISHED}123').write_text('half')
    run_ranks(train, 2, tmp_path)
    assert not list(tmp_path.glob(f'*{writing.UNFINISHED}*'))


def test_an_end_that_cannot_be_noted_is_a_warning(tmp_path):
    (tmp_path / '.finished').mkdir()
    (found,) = run_ranks(train, 0, tmp_path)
    assert found['iter'] == 52
    assert 'Resuming this run will validate once more' in log_of(tmp_path)


def test_out_dir_that_cannot_be_made(tmp_path):
    (tmp_path / 'file').write_text('')
    checkpoint = dict(interval=1, out_dir=str(tmp_path / 'file' / 'deeper'))
    errors = errors_of_ranks(partial(train, checkpoint=checkpoint), 2, tmp_path / 'work')
    assert 'cannot make the folder' in errors[0][1]
    assert 'rank 0 of 2' in errors[1][1]


def test_another_folder(tmp_path):
    into = partial(train, checkpoint=dict(interval=1, out_dir=str(tmp_path / 'files')))
    run_ranks(into, 0, tmp_path / 'work')
    assert names_in(tmp_path / 'files' / 'work') == [f'epoch_{n}.pth' for n in (1, 2, 3, 4)]
    (found,) = run_ranks(partial(into, resume=True), 0, tmp_path / 'work')
    assert found['iter'] == 52
