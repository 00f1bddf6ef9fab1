"""What cannot be exchanged: all ranks refuse it with one message, and can go on."""

import threading
from functools import lru_cache

import pytest
import torch
from torch import distributed as torch_dist

from mmdevplug import samples as exchanges
from mmdevplug.errors import SampleError
from tests.jobs import start
from tests.ranks import run_ranks


def exchange(name, samples, group=None, **options):
    return getattr(exchanges, name)(samples, group=group, **options)


def differing(rank, case):
    """Samples of rank 1 that do not fit those of rank 0, and the words that say so."""
    first, other, place, expected, found = DIFFERENCES[case]
    return [first(), first()] if rank == 0 else [first(), other()]


def x(value):
    return lambda: dict(x=value, y=[0])


DIFFERENCES = dict(
    keys=(x(0), lambda: dict(z=0, y=[0]), 'at sample,', "['x', 'y']", "['z', 'y']"),
    type=(x('a'), x(b'a'), "at sample['x'],", 'a str', 'a bytes'),
    dtype=(
        x(torch.zeros(1)),
        x(torch.zeros(1).double()),
        "at sample['x'],",
        'a tensor float32',
        'a tensor float64',
    ),
    leaf=(x(torch.zeros(1)), x(0.5), "at sample['x'],", 'a tensor float32', 'a float'),
    container=(x((1, 2)), x([1, 2]), "at sample['x'],", 'a tuple of 2', 'a list int'),
    length=(x((1, 2)), x((1, 2, 3)), "at sample['x'],", 'a tuple of 2', 'a tuple of 3'),
    items=(x([['a']]), x([['a'], [1]]), "at sample['x'][...][...],", 'a str', 'a int'),
)
#: All of these are samples of one kind.
FITTING = [
    dict(x=0, y=None, z=[torch.zeros(2, 3)], a=''),
    dict(a='a', x=0.5, y='text', z=[]),
    dict(x=2**90, y=None, z=[torch.zeros(1), torch.zeros(())], a='b'),
]


def refusals(name):
    """Exchange every kind of bad input in turn; return type and text of each error."""
    context = start()
    rank = context.env.rank
    pair = torch_dist.new_group([0, 1])
    good = [torch.tensor(rank)]
    found = {}

    def refuse(case, *args, **kwargs):
        try:
            exchange(name, *args, **kwargs)
        except Exception as error:
            found[case] = (type(error).__name__, str(error))
        else:
            found[case] = ('nothing', 'was raised')

    for case in DIFFERENCES:
        refuse(case, differing(rank, case))
    refuse('lock', [threading.Lock()] if rank == 1 else good)
    refuse('batch', dict(x=torch.zeros(2)) if rank == 1 else good)
    refuse('tensor', torch.zeros(2) if rank == 1 else good)
    refuse('options', good, allow_pickle=rank == 1)
    refuse('group', good, group=[torch.zeros(1)])
    if name == 'balance_samples':
        refuse('short', [0, 1] if rank == 1 else [], per_rank=2)
        refuse('negative', good, per_rank=-1)
        refuse('other', good, per_rank=rank)
    else:
        refuse('limit', good, max_bytes=100 if rank == 1 else None)
        refuse('zero', good, max_bytes=0)
    # Nobody has been left behind, and nothing is left of what was refused.
    pool = exchange('gather_samples', good, group=pair)
    assert [int(each) for each in pool] == [0, 1]
    assert [len(exchange(name, FITTING)) for _ in range(2)] == [6, 6] or name != 'gather_samples'
    return found


@lru_cache(maxsize=None)
def refused_by(name):
    """For each case what the two ranks raised."""
    found = run_ranks(refusals, 2, name)
    return {case: [each[case] for each in found] for case in found[0]}


@pytest.fixture(params=['gather_samples', 'balance_samples'])
def refused(request):
    return refused_by(request.param)


@pytest.mark.parametrize('case', DIFFERENCES)
def test_the_first_difference_is_named(refused, case):
    _, _, place, expected, found = DIFFERENCES[case]
    (kind, text), other = refused[case]
    assert (kind, text) == other
    assert kind == 'SampleError'
    assert 'sample 1 of rank 1 has' in text
    assert 'sample 0 of rank 0 has' in text
    described, _, reference = text.partition(', where')
    assert place in text
    assert expected in reference
    assert found in described


@pytest.mark.parametrize('samples', [[None, 1, 'a'], [[], [1], ['a']]])
def test_samples_are_compared_with_the_first_that_has_something(samples):
    with pytest.raises(SampleError, match='sample 2 of rank 0 .* where sample 1 of rank 0'):
        exchanges.gather_samples(samples)


@pytest.mark.parametrize(
    ('case', 'words'),
    [
        ('lock', 'sample 0 is a _thread.lock, which cannot travel'),
        ('batch', 'samples is a dict; expected a list of samples'),
        ('tensor', 'samples is a Tensor; expected a list of samples'),
    ],
)
def test_what_one_rank_cannot_send_ends_the_call_on_all(refused, case, words):
    (kind, text), (own_kind, own) = refused[case]
    assert (kind, own_kind) == ('RankFailedError', 'SampleError')
    assert words in own
    assert 'stops because of rank 1: ' in text
    assert words in text


def test_other_options_are_named(refused):
    for kind, text in refused['options']:
        assert kind == 'SampleError'
        assert text.startswith('rank 1 calls ')
        assert 'same options on all ranks' in text


def test_a_list_in_the_place_of_the_group_is_named(refused):
    for kind, text in refused['group']:
        assert (kind, text[:25]) == ('SampleError', 'group is a list; expected')


def test_too_few_samples_are_counted():
    found = {case: first for case, (first, _) in refused_by('balance_samples').items()}
    kind, text = found['short']
    assert kind == 'SampleError'
    assert 'per_rank=2 on 2 ranks needs 4 samples, but the pool has 2' in text
    assert 'rank 0 has 0, rank 1 has 2' in text
    assert 'per_rank=-1: expected a number of samples' in found['negative'][1]
    assert 'per_rank=1 on rank 1, but 0 on rank 0' in found['other'][1]


def test_pools_larger_than_the_limit_are_refused_before_they_travel():
    found = refused_by('gather_samples')
    for (kind, text), (_, zero) in zip(found['limit'], found['zero']):
        assert kind == 'SampleError'
        assert 'more than max_bytes, 100 bytes; rank 0 has the most' in text
        assert 'max_bytes=0: expected' in zero
