"""Checkpoints of sharded trainings: a file or a folder, resumed to the same bits."""

import os
import pickle
import re
import signal
import zlib
from functools import partial
from unittest.mock import patch

import pytest
import torch
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import _load_checkpoint_to_model

from mmdevplug.errors import CheckpointError
from tests.cli.running import config, mmdevplug
from tests.jobs import load_file
from tests.parallel_jobs import build
from tests.ranks import RanksFailed, in_ranks, run_ranks

from .jobs import train, whole
from .test_training import ADAM, EMA, NO_DECAY, needs_card, pytestmark  # noqa: F401

HALF = 5
OPTIONS = dict(
    optim_wrapper__optimizer=ADAM,
    optim_wrapper__paramwise_cfg=dict(NO_DECAY, bypass_duplicate=True),
    optim_wrapper__clip_grad=dict(max_norm=1.0),
    default_hooks__checkpoint__interval=HALF,
    param_scheduler=[dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=8)],
)


def run(work_dir, sharding, kind='twice', device='cpu', **options):
    hooks = [] if sharding.get('sharded_checkpoint') else EMA
    options = dict(OPTIONS, custom_hooks=hooks, **options)
    return train(kind, device, work_dir, sharding=sharding, **options)


def load_alone(path):
    """What MMEngine's own functions make of a file in one process."""
    model = MODELS.build(dict(type='ShardedTwice'))
    _load_checkpoint_to_model(model, load_file(path), strict=True)
    return model.state_dict()


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], expected[k]) for k in found
    )


@pytest.mark.parametrize('folder', [False, True])
def test_a_resumed_run_is_the_run_that_was_interrupted(folder, tmp_path):
    sharding = dict(sharded_checkpoint=folder)
    first = tmp_path / 'first'
    complete = run_ranks(run, 2, str(first), sharding)
    path = str(first / f'iter_{HALF}.pth')
    assert os.path.isdir(str(first / f'iter_{HALF}.shards')) is folder
    again = dict(resume=True, load_from=path)
    resumed = run_resumed(2, tmp_path, sharding, again)
    for one, other in zip(complete, resumed):
        assert other['losses'][HALF:] == one['losses'][HALF:]  # those before are rank 0's alone
        assert equal(other['weights'], one['weights'])
        assert equal(other['averaged'], one['averaged'])
        assert len(one['states']) == len(other['states']) > 0
        assert all(map(torch.equal, one['states'], other['states']))
    for ranks in (0, 4):
        for other in run_resumed(ranks, tmp_path, sharding, again):
            for of in ('weights', 'averaged'):
                for name, weight in complete[0][of].items():
                    torch.testing.assert_close(other[of][name], weight, rtol=0, atol=1e-5)
    last = str(first / 'iter_10.pth')
    if folder:
        assert 'shards' in load_file(last)
    else:
        assert equal(load_alone(last), complete[0]['averaged'])
        file = load_file(last)
        tied = [file['state_dict'][f'blocks.{n}.second.weight'].data_ptr() for n in (2, 3)]
        assert tied[0] == tied[1]  # gathered and saved once
        assert 'module.stem.weight' in file['ema_state_dict']
        saved = file['optimizer']['state']
        shapes = {each['exp_avg'].shape for each in saved.values()}
        assert complete[0]['weights']['stem.weight'].shape in shapes


def run_resumed(ranks, tmp_path, sharding, again):
    return run_ranks(partial(run, **again), ranks, str(tmp_path / f'on_{ranks}'), sharding)


@in_ranks(2)
def test_a_save_that_dies_leaves_the_checkpoint_that_it_replaces(tmp_path):
    """Save a second time under a name, first as a process that is killed before the file."""
    from torch.distributed import checkpoint

    work_dir = str(tmp_path)
    options = dict(OPTIONS, default_hooks__checkpoint__interval=1000)
    sharding = dict(sharded_checkpoint=True)
    runner = build('twice', 'cpu', work_dir, sharding=sharding, **options)
    runner.train()
    weights = {name: whole(value) for name, value in runner.model.state_dict().items()}
    for parameter in runner.model.parameters():
        parameter.detach().to_local().zero_()
    save = checkpoint.save

    def save_and_die(*args, **kwargs):
        save(*args, **kwargs)
        raise RuntimeError('killed')

    with patch.object(checkpoint, 'save', save_and_die):
        with pytest.raises(RuntimeError, match='killed'):
            runner.save_checkpoint(work_dir, 'iter_10.pth')
    path = os.path.join(work_dir, 'iter_10.pth')
    found = []
    for _ in range(2):
        runner.load_checkpoint(path)
        found.append({name: whole(each) for name, each in runner.model.state_dict().items()})
        for parameter in runner.model.parameters():
            parameter.detach().to_local().fill_(2)
        runner.save_checkpoint(work_dir, 'iter_10.pth')
        torch.distributed.barrier()
    assert equal(found[0], weights)
    assert {float(each.mean()) for each in found[1].values()} == {2.0}
    assert len(list(tmp_path.glob('iter_10.shards*'))) == 1


def die_while_overwriting(work_dir):
    """Train, then be killed while shards are written in place of those of the checkpoint."""
    from torch.distributed.checkpoint import FileSystemWriter

    options = dict(OPTIONS, sharding=dict(sharded_checkpoint=True))
    runner = build('twice', 'cpu', work_dir, **options)
    runner.train()
    for parameter in runner.model.parameters():
        parameter.detach().to_local().zero_()
    write = FileSystemWriter.write_data

    def write_and_die(*args):
        if torch.distributed.get_rank() % 2:
            write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    FileSystemWriter.write_data = write_and_die
    runner.save_checkpoint(work_dir, 'iter_10.pth')


@pytest.mark.long
def test_a_start_after_a_kill_resumes_from_a_whole_checkpoint(tmp_path):
    sharding, longer = dict(sharded_checkpoint=True), dict(train_cfg__max_iters=15)
    complete = run_ranks(partial(run, **longer), 4, str(tmp_path / 'whole'), sharding)
    folder = tmp_path / 'killed'
    with pytest.raises(RanksFailed, match='the process died'):
        run_ranks(die_while_overwriting, 4, str(folder))
    assert list((folder / 'iter_10.shards-1' / 'state_dict').iterdir())
    again = run_ranks(partial(run, **longer, resume=True), 4, str(folder), sharding)
    for one, other in zip(complete, again):
        assert other['losses'][10:] == one['losses'][10:]
        assert equal(other['weights'], one['weights'])


ON_HOST = dict(offload=True, sharded_checkpoint=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ('ranks', 'kind', 'device', 'sharding'),
    [
        (1, 'segformer', 'cpu', {}),
        (4, 'segformer', 'cpu', {}),
        pytest.param(2, 'twice', 'streams', ON_HOST, marks=needs_card),
    ],
)
def test_other_jobs_resume_to_the_same_bits(ranks, kind, device, sharding, tmp_path):
    options = dict(kind=kind, device=device)
    complete = run_ranks(partial(run, **options), ranks, str(tmp_path / 'first'), sharding)
    path = str(tmp_path / 'first' / f'iter_{HALF}.pth')
    options.update(resume=True, load_from=path)
    for one, other in zip(complete, run_resumed(ranks, tmp_path, sharding, options)):
        assert other['losses'][HALF:] == one['losses'][HALF:]
        assert equal(other['weights'], one['weights'])
        assert equal(other['averaged'], one['averaged'])


def test_the_command_tests_the_file_of_a_sharded_training(tmp_path):
    lines = f'custom_hooks = {EMA}\ntrain_cfg = dict(max_epochs=1, val_interval=1)'
    path = str(config(tmp_path, f'{lines}\ndefault_hooks = dict(checkpoint=dict(interval=1))'))
    place = ['--work-dir', str(tmp_path)]
    trained = mmdevplug(tmp_path, 'train', path, '--sharded', '--nproc', '2', *place)
    assert trained.returncode == 0, trained.stderr
    said = trained.stdout + trained.stderr
    assert 'sharding: ' in ''.join(each.read_text() for each in tmp_path.rglob('*.log')), said
    accuracies = {re.findall(r'accuracy: ([\d.]+)', said)[-1]}
    for ways in ([], ['--nproc', '2', '--cfg-options', 'sharding=True']):
        tested = mmdevplug(tmp_path, 'test', path, str(tmp_path / 'epoch_1.pth'), *place, *ways)
        assert tested.returncode == 0, tested.stderr
        accuracies.add(re.findall(r'accuracy: ([\d.]+)', tested.stdout + tested.stderr)[-1])
    assert len(accuracies) == 1


class Opens:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


#: Changes of a checkpoint, and what is said of it.
FOREIGN = [
    (
        dict(shards='/elsewhere'),
        ["names '/elsewhere' as the folder of its shards", "expected 'iter_10.shards'"],
    ),
    (dict(shards=['a']), ["names ['a']"]),
    (dict(shard_sums=None), ['holds no checksums of its shards']),
    ({}, ['.metadata names', 'which could run code']),
]


@in_ranks(2)
def test_shards_of_somebody_else_run_no_code(tmp_path):
    """They are elsewhere, have no checksums, or run code."""
    work_dir = str(tmp_path)
    runner = build('twice', 'cpu', work_dir, sharding=dict(sharded_checkpoint=True), **OPTIONS)
    runner.train()
    path = os.path.join(work_dir, 'iter_10.pth')
    saved = load_file(path)
    torch.distributed.barrier()
    index = os.path.join(work_dir, 'iter_10.shards', 'state_dict', '.metadata')
    for change, words in FOREIGN:
        if runner.rank == 0:
            if not change:
                with open(index, 'wb') as file:
                    pickle.dump(Opens(os.path.join(work_dir, 'ran')), file)
                with open(index, 'rb') as file:
                    sums = {**saved['shard_sums'], 'state_dict/.metadata': zlib.crc32(file.read())}
                change = dict(shard_sums=sums)
            torch.save(dict(saved, **change), path)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError) as raised:
            runner.load_checkpoint(path)
        assert all(each in str(raised.value) for each in words), raised.value
        torch.distributed.barrier()
    assert not (tmp_path / 'ran').exists()
