"""Data that is missing on a rank, or of another length there."""

from functools import partial

import pytest
from mmengine.dist import dist as mmengine_dist

from tests.data import jobs
from tests.ranks import errors_of_ranks, run_ranks


def failure(ranks, *args, **kwargs):
    return errors_of_ranks(partial(jobs.train, **kwargs), ranks, *args)


EMPTY = dict(bad=0, rank=1, data_root='data/digits', ann_file='train.json')


@pytest.mark.parametrize(
    ('dataset', 'options'),
    [
        (EMPTY, {}),
        # MMEngine's InfiniteSampler looks for a first sample without end.
        (dict(EMPTY, serialize_data=False), {}),
        (dict(EMPTY, serialize_data=False), dict(epochs=1)),
        (dict(EMPTY, lazy_init=True), dict(epochs=1)),
    ],
)
def test_dataset_that_is_empty_on_one_rank(tmp_path, dataset, options):
    errors = failure(2, tmp_path, dataset=dataset, **options)
    assert errors[1][0] == 'SampleError'
    assert errors[0][0] == 'RankFailedError'
    for rank in (0, 1):
        message = errors[rank][1]
        assert "rank 1: Some(ann_file='data/digits/train.json', data_root='data/digits'" in message
        assert 'has 0 samples' in message
        assert 'on every host' in message


FILTERED = dict(count=5, filter_cfg=dict(leave_crowded_out=True))
PART = dict(type='Some', count=0, data_prefix=dict(img='images'))


@pytest.mark.parametrize(
    ('dataset', 'options', 'words'),
    [
        # Told from an empty folder.
        (
            FILTERED,
            {},
            ["filter_cfg={'leave_crowded_out': True}", '5 were found', 'filter_cfg=None'],
        ),
        (
            dict(type='RepeatDataset', times=3, dataset=PART),
            {},
            ["Some(data_prefix={'img': 'images'})", 'a part of RepeatDataset'],
        ),
        (
            dict(count=3),
            dict(epochs=1, train_dataloader=dict(drop_last=True)),
            ['train_dataloader has no batch', '3 samples', 'batch_size=4 and drop_last=True'],
        ),
    ],
    ids=['filtered', 'part', 'no batch'],
)
def test_data_without_a_batch(tmp_path, dataset, options, words):
    kind, message = failure(0, tmp_path, dataset=dataset, **options)[0]
    assert kind == 'SampleError'
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize('ranks', [2, 3])
def test_ranks_with_fewer_batches_are_named_before_training(tmp_path, ranks):
    errors = failure(ranks, tmp_path, dataset=dict(count=48, bad=8, rank=1), epochs=1)
    batches = 48 // ranks // 4
    assert errors[1][0] == 'SampleError'
    for rank in range(ranks):
        message = errors[rank][1]
        # The others wait a little for rank 1 to speak, and then say the same by themselves.
        assert errors[rank][0] in ('SampleError', 'RankFailedError')
        assert 'different numbers of batches of Some(), and would wait' in message
        assert 'rank 1 has 1 (8 samples)' in message
        assert f'rank 0 has {batches} (48 samples)' in message
        assert 'DefaultSampler' in message
    assert not list(tmp_path.glob('*/*.json'))  # nothing was logged of an iteration


def test_loops_that_count_iterations_take_what_each_rank_has(tmp_path):
    options = dict(dataset=dict(count=48, bad=8, rank=1))
    assert run_ranks(partial(jobs.train, **options), 2, tmp_path) == [4, 4]


LOSES_RESULTS = pytest.mark.skipif(
    'zip_longest' not in vars(mmengine_dist),
    reason='MMEngine 0.10.0 loses results of ranks with more samples than others',
)


@pytest.mark.parametrize('round_up', [True, pytest.param(False, marks=LOSES_RESULTS)])
def test_validation_of_fewer_samples_than_ranks_loses_none(tmp_path, round_up):
    loader = dict(
        dataset=dict(type='Some', count=1),
        sampler=dict(type='DefaultSampler', shuffle=False, round_up=round_up),
    )
    assert run_ranks(partial(jobs.train, val_dataloader=loader), 3, tmp_path) == [1, 1, 1]


def test_validation_without_samples_on_one_rank(tmp_path):
    dataset = dict(type='Some', serialize_data=False, bad=0, rank=0)
    errors = failure(2, tmp_path, val_dataloader=dict(dataset=dataset))
    assert errors[0][0] == 'SampleError'
    assert errors[1][0] == 'RankFailedError'
    assert 'rank 0: Some() has 0 samples' in errors[1][1]
