"""One process that drives all chips trains what one process with the whole batch trains."""

from functools import lru_cache, partial

import pytest

from tests.features.rows import ROWS, train_rows
from tests.jobs import largest_difference
from tests.ranks import RanksFailed, run_ranks
from tests.xla.spmd_jobs import (
    CHIPS,
    SAVED,
    TWO_CHIPS,
    spmd_config,
    train_row_from,
    train_rows_on_chips,
    train_saving,
)

pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]

DIVIDED = [
    'adamw',
    'clip_norm',
    'accumulation',
    'ema',
    'amp',
    'sync_bn',
    'unused',
    'collect_results',
]
WHOLE = ['clip_norm', 'sync_bn', 'amp']


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
    """What one process on the CPU trains with the whole batch."""
    (found,) = run_ranks(train_rows, 0, DIVIDED, 'cpu', tmp_path_factory.mktemp('cpu'), True)
    return found


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """What all chips of a process train with whole weights, and with divided ones."""

    @lru_cache(maxsize=None)
    def of(job):
        names, changes = (DIVIDED, SAVED) if job == 'divided' else (WHOLE, dict(sharding=False))
        train = partial(train_rows_on_chips, **changes)
        (found,) = run_ranks(train, 0, names, tmp_path_factory.mktemp(job), **TWO_CHIPS)
        return found

    return of


every_row = pytest.mark.parametrize(
    ('job', 'name'),
    [*(('whole', name) for name in WHOLE), *(('divided', name) for name in DIVIDED)],
)


@every_row
def test_weights_are_those_of_one_process(trained, reference, job, name):
    difference = largest_difference(trained(job)[name]['weights'], reference[name]['weights'])
    assert difference < ROWS[name].tolerance


@every_row
def test_an_iteration_is_one_execution(trained, job, name):
    assert trained(job)[name]['executions'] == [(1, 0)] * 5


def test_a_chip_holds_its_part_of_divided_weights_and_states(trained):
    for share in trained('divided')['adamw']['shares']:
        assert share == pytest.approx(1 / CHIPS, abs=0.01)
    assert trained('whole')['clip_norm']['shares'] == (1, 1)


def test_a_training_goes_on_from_its_file_and_from_that_of_one_process(
    tmp_path, tmp_path_factory, trained, reference
):
    whole = trained('divided')['adamw']['weights']
    path = next(tmp_path_factory.getbasetemp().glob('divided*/adamw/iter_10.pth'))
    (again,) = run_ranks(train_row_from, 0, 'adamw', 'spmd', tmp_path, path, **TWO_CHIPS)
    assert largest_difference(again['weights'], whole) == 0
    # One process reads it, and N ranks do, which read the same state.
    others = run_ranks(train_row_from, 0, 'adamw', 'cpu', tmp_path / 'cpu', path)
    others += run_ranks(train_row_from, 2, 'adamw', 'cpu', tmp_path / 'ranks', path)
    run_ranks(train_saving, 0, 'adamw', 'cpu', tmp_path / 'saved')
    path = tmp_path / 'saved' / 'adamw' / 'iter_10.pth'
    others += run_ranks(train_row_from, 0, 'adamw', 'spmd', tmp_path / 'chips', path, **TWO_CHIPS)
    for found in others:
        assert largest_difference(found['weights'], reference['adamw']['weights']) < 1e-5


def _train_undivided(folder):
    """With batches of 13 samples of one chip, less than a whole one at the end of the data."""
    changes = spmd_config('sync_bn', folder).train_dataloader
    changes.update(batch_size=13, sampler=dict(type='DefaultSampler', shuffle=False))
    changes.dataset.indices = 77
    schedule = dict(by_epoch=True, max_epochs=2, val_interval=10)
    found = train_rows_on_chips(['sync_bn'], folder, train_dataloader=changes, train_cfg=schedule)
    return found['sync_bn']


def _train_undivided_on_cpu(folder):
    from tests.features.rows import row_config, train_config

    cfg = row_config('sync_bn', 'cpu', folder, True)
    cfg.train_dataloader.update(batch_size=26, sampler=dict(type='DefaultSampler', shuffle=False))
    cfg.train_dataloader.dataset.indices = 77
    cfg.pop('train_cfg')
    cfg.train_cfg = dict(by_epoch=True, max_epochs=2, val_interval=10)
    return train_config(cfg)


def test_a_batch_that_cannot_be_divided_is_computed_whole(tmp_path):
    (expected,) = run_ranks(_train_undivided_on_cpu, 0, tmp_path / 'cpu')
    (found,) = run_ranks(_train_undivided, 0, tmp_path, **TWO_CHIPS)
    assert largest_difference(found['weights'], expected['weights']) < 1e-5
    assert any('a batch of 25 cannot be divided among 2 chips' in line for line in found['told'])


def _build(changes, folder):
    from mmdevplug.runner import DeviceRunner

    cfg = spmd_config('sgd', folder, **changes)
    DeviceRunner.from_cfg(cfg)


@pytest.mark.parametrize(
    ('ranks', 'changes', 'words'),
    [
        (2, {}, '2 processes were started'),
        (0, dict(accelerator=dict(type='xla', spmd='yes')), "accelerator.spmd='yes'"),
        (0, dict(accelerator=dict(type='cpu', spmd=True)), 'an option it does not take'),
        (0, dict(sharding=dict(offload=True)), 'sharding has offload'),
        (0, dict(model_parallel=dict(enable=True)), 'accelerator.spmd and model_parallel'),
        (0, dict(train_dataloader=dict(dataset=None)), 'no batch_size'),
    ],
    ids=['ranks', 'value', 'accelerator', 'options', 'model_parallel', 'batch_size'],
)
def test_is_refused(tmp_path, ranks, changes, words):
    with pytest.raises(RanksFailed, match=words):
        run_ranks(_build, ranks, changes, tmp_path, **TWO_CHIPS)
