"""Ranks that fail, die, lag or never come while all of them sample, or exchange samples."""

import os
import signal
import time
from functools import partial

import pytest
import torch

from mmdevplug import samples
from mmdevplug.fault_tolerance import failure, failure_watch
from mmdevplug.samples import DynamicSampler, gather_samples
from tests.jobs import start
from tests.ranks import check_errors, errors_of_ranks, run_ranks


def sample(accident, where='generate', rounds=2, timeout=60, **options):
    """Sample; in the second round something happens to rank 1."""
    failure_watch.REPORT_SECONDS = 2.0
    rank, calls = start(timeout=timeout).env.rank, []

    def generate():
        calls.append(None)
        if rank == 1 and len(calls) == 2 and where == 'generate':
            accident()
        return [torch.tensor([rank, len(calls), index]) for index in range(2)]

    def is_valid(found):
        if rank == 1 and len(calls) == 2 and where == 'is_valid':
            accident()
        return len(calls) == rounds

    return next(DynamicSampler(generate, is_valid, 4, **options))


def exchange(name, accident, timeout=60):
    """Exchange twice; before the second time something happens to rank 1."""
    failure_watch.STOP_SECONDS = 1.0
    rank = start(timeout=timeout).env.rank
    held = [dict(x=torch.full((1 << 17,), float(rank)))] * (6 if rank == 1 else 1)
    with failure.fail_together('training'):
        for turn in range(2):
            if rank == 1 and turn == 1:
                accident()
            getattr(samples, name)(held)


def errors_of(function, world_size, *args):
    return errors_of_ranks(function, world_size, *args, timeout=90, together=True)


def fail():
    raise ValueError('the reward is NaN')


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(3600)


def go_on():
    pass


@pytest.mark.parametrize('where', ['generate', 'is_valid'])
def test_an_error_of_one_rank_ends_all_with_its_name(where):
    errors = errors_of(sample, 2, fail, where)
    assert errors.pop(1) == ('ValueError', 'the reward is NaN')
    expected = f'rank 1 of 2 failed in {where}(), resample 1: ValueError: the reward is NaN'
    check_errors(errors, 'RankFailedError', expected)


def sample_and_fail_to_collate():
    # The other rank waits in a collective and is ended by its watch.
    failure_watch.STOP_SECONDS = 1.0
    rank = int(os.environ['RANK'])
    sample(go_on, collate=lambda samples: samples[0 if rank else 9])
    gather_samples([rank])


def test_a_batch_that_one_rank_cannot_make_ends_all():
    errors = errors_of(sample_and_fail_to_collate, 2)
    assert errors[0] == ('IndexError', 'list index out of range')
    assert errors[1][0] in ('Died', 'RankFailedError')


def test_a_rank_that_is_killed_is_named():
    errors = errors_of(sample, 4, die)
    assert errors.pop(1)[0] == 'Died'
    assert sorted(errors) == [0, 2, 3]
    check_errors(errors, 'RankFailedError', 'because of rank 1 of 4')


def sample_slowly():
    """Rank 1 does not go on before the others have asked for it."""
    told = []

    def tell(text, *_):
        told.append(text)
        if "in 'generating, resample 1'" in text:
            failure.current_job()[0].set('told', '1')

    failure_watch.say = tell
    return sample(lambda: failure.current_job()[0].wait(['told'])).tolist(), told


def test_a_slow_rank_is_named_and_waited_for():
    (first, told), (second, others) = run_ranks(sample_slowly, 2, timeout=90)
    assert first == [[0, 2, 0], [0, 2, 1]]
    assert second == [[1, 2, 0], [1, 2, 1]]
    last = (told + others)[-1]
    assert "rank 0 in 'sampling, resample 1: waiting for the others'" in last
    assert "rank 1 in 'generating, resample 1'" in last


def sample_and_stay_away():
    # It cannot be ended by an exception while it hangs, so its watch ends it.
    failure_watch.STOP_SECONDS = 1.0
    sample(hang, timeout=3)


def test_a_rank_that_hangs_is_given_up():
    errors = errors_of(sample_and_stay_away, 2)
    assert errors.pop(1)[0] == 'Died'
    missing = "missing after 3 s at 'sampling, resample 1'"
    place = "in 'generating, resample 1'"
    check_errors(errors, 'RankFailedError', 'because of rank 1 of 2', place, missing)


def test_too_few_ends_all_ranks_with_the_same_message():
    errors = errors_of(partial(sample, rounds=9, max_resamples=2), 2, go_on)
    assert len(errors) == 2
    assert errors[0] == errors[1]
    check_errors(errors, 'SampleError', '0 of target=4 samples, 4 too few, after 2 resample(s)')


@pytest.mark.parametrize('name', ['gather_samples', 'balance_samples'])
@pytest.mark.parametrize(('accident', 'timeout'), [(die, 60), (hang, 4)])
def test_the_rank_is_named(name, accident, timeout):
    errors = errors_of(exchange, 3, name, accident, timeout)
    assert errors.pop(1)[0] == 'Died'
    assert sorted(errors) == [0, 2]
    check_errors(errors, 'RankFailedError', 'because of rank 1 of 3')
