"""The scripts in tools/ and the command mmdevplug, as a user runs them."""

import os
from unittest.mock import Mock

import pytest
from mmengine.config import Config
from mmengine.registry import RUNNERS

from mmdevplug.cli import train
from mmdevplug.config.load import find_unread
from tests.cli.running import CONFIG, PLAIN, STANDIN, config, with_card
from tests.commands import environment, python, run
from tests.ranks import free_port

TWO_EPOCHS = ['--cfg-options', 'train_cfg.max_epochs=2', 'train_cfg.val_interval=2']


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Two ranks through dist_train.sh."""
    folder = tmp_path_factory.mktemp('trained')
    done = run(
        *('bash', 'tools/dist_train.sh', CONFIG, '2', '--work-dir', folder, *TWO_EPOCHS),
        'default_hooks.checkpoint.interval=1',
        env=environment(STANDIN, PORT=str(free_port())),
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_train_resumes_from_the_newest_checkpoint(trained):
    options = ['--cfg-options', 'train_cfg.max_epochs=3']
    command = ['tools/train.py', CONFIG, '--work-dir', trained, '--resume', *options]
    done = python(*command, env=environment(STANDIN))
    assert done.returncode == 0, done.stderr
    assert 'resumed epoch: 2' in done.stdout + done.stderr


@pytest.mark.long
def test_test_and_dist_test_print_the_metric(trained):
    checkpoint = str(trained / 'epoch_2.pth')
    if not os.path.isfile(checkpoint):  # the resumed run above keeps the newest alone
        checkpoint = (trained / 'last_checkpoint').read_text()
    work_dir = ['--work-dir', str(trained / 'test')]
    out = str(trained / 'predictions.pkl')
    env = environment(STANDIN, PORT=str(free_port()))
    one = python('tools/test.py', CONFIG, checkpoint, *work_dir, '--out', out, env=env)
    two = run('bash', 'tools/dist_test.sh', CONFIG, checkpoint, '2', *work_dir, env=env)
    three = with_card('test', CONFIG, checkpoint, '--nproc', '2', '--verbose', *work_dir)
    assert 'Distributed training: True' in three.stdout + three.stderr
    for done in (one, two, three):
        assert done.returncode == 0, done.stderr
        assert 'accuracy: ' in done.stdout + done.stderr
    assert os.path.getsize(out) > 0


@pytest.mark.long
def test_train_overlays_a_base_config_on_an_untouched_config(tmp_path):
    # As OpenMMLab's configs are: nccl, and no word of another accelerator.
    lines = "env_cfg = dict(dist_cfg=dict(backend='nccl'))"
    done = with_card(
        *('train', config(tmp_path, lines, base=PLAIN), '--accelerator', 'cpu'),
        *('--nproc', '2', '--work-dir', tmp_path, '--auto-scale-lr', *TWO_EPOCHS),
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert "backend 'gloo'" in printed
    assert 'LR is set based on batch size of 128' in printed


def test_an_overlaid_base_config_keeps_options_of_ours(tmp_path, monkeypatch):
    built = []
    lines = (
        "accelerator = dict(type='xla', backend='mine', memory=False, resume_settings='config')"
    )
    path = config(tmp_path, lines, base=PLAIN)
    monkeypatch.setattr(RUNNERS, 'build', lambda cfg: built.append(cfg) or Mock())
    train.main([str(path), '--accelerator', 'cpu', '--work-dir', str(tmp_path)])
    kept = dict(type='cpu', backend='gloo', memory=False)
    assert built[0].accelerator == dict(kept, resume_settings='config')
    train.main([str(path), '--accelerator', 'cpu', '--resume-settings', 'checkpoint'])
    assert built[1].accelerator == dict(kept, resume_settings='checkpoint')


@pytest.mark.long
def test_a_backend_on_the_command_line_wins_and_is_refused_on_the_cpu(tmp_path):
    options = ['--cfg-options', 'env_cfg.dist_cfg.backend=nccl']
    command = ['train', CONFIG, '--accelerator', 'cpu', '--nproc', '2', '--work-dir', tmp_path]
    done = with_card(*command, *options)
    assert done.returncode != 0
    assert "'nccl' does not work on accelerator 'cpu'" in done.stderr
    assert 'mmdevplug: LaunchError' in done.stderr


def test_options_that_no_runner_reads_are_named():
    cfg = Config(dict(optim_wrapper=dict(optimizer=dict(lr=1)), train_cfg=dict(max_epochs=1)))
    read = ['train_cfg.max_epochs', 'find_unused_parameters', 'model.depth', 'data_preprocessor']
    assert list(find_unread(cfg, read)) == []
    found = list(find_unread(cfg, ['max_epochs', 'optimizer.lr', 'train_cgf.max_epochs']))
    meant = ['train_cfg.max_epochs', 'optim_wrapper.optimizer.lr', 'train_cfg']
    assert [line.rpartition('did you mean ')[2] for line in found] == [f'{e!r}?' for e in meant]
