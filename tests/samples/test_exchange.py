"""Pools and slices over real gloo process groups."""

import pytest
from torch import distributed as torch_dist

from mmdevplug.errors import SampleError
from mmdevplug.samples import gather_samples
from tests.columns import NATIVE, device_of, job_of, on_xla
from tests.jobs import start
from tests.ranks import in_ranks, run_ranks

from .jobs import exchange_in_groups, exchange_on


@pytest.mark.parametrize('ranks', [3, pytest.param(8, marks=pytest.mark.long)])
def test_pools_and_slices_of_any_samples_in_groups_of_1_rank_to_all(ranks):
    for rank, checked in enumerate(run_ranks(exchange_in_groups, ranks, ranks, 12)):
        # The last rank is in all groups, rank 0 in the largest alone.
        assert sorted(checked) == list(range(ranks - rank, ranks + 1))
        for size, (examples, samples) in checked.items():
            assert examples == 12
            assert samples > 0, f'all pools of {size} ranks were empty'


@pytest.mark.parametrize(
    ('accelerator', 'per_rank'),
    [
        ('zeta', [2, 2, 2, 2]),
        ('zeta', [0, 5, 0, 1]),
        ('zeta', [3]),
        (NATIVE, [0, 3]),
        pytest.param('cuda', [0, 3], marks=pytest.mark.cuda),
        pytest.param('cuda', [3], marks=pytest.mark.cuda),
        on_xla('xla', [2, 3]),
        on_xla('xla', [0, 4]),
    ],
)
def test_samples_arrive_on_the_card_of_the_receiver(accelerator, per_rank):
    total, ranks = sum(per_rank), len(per_rank)
    job = run_ranks(exchange_on, ranks, accelerator, per_rank, **job_of(accelerator, ranks))
    for rank, found in enumerate(job):
        check_found(found, rank, per_rank)
        assert found['device'] == device_of(accelerator, rank, ranks)
        assert found['sizes'] == [total // ranks + (r < total % ranks) for r in range(ranks)]


def check_found(found, rank, per_rank):
    """What :func:`exchange_on` returned on one rank."""
    assert found['devices'] == [found['device']]
    assert found['own_stayed'], 'tensors that were there have been copied'
    assert found['pool']
    assert found['slices']
    assert found['batch'] == [
        10.0 * r + n for r in range(len(per_rank)) for n in range(per_rank[r])
    ]


def groups_of(rank):
    """Two groups of two samples each."""
    return [[10 * rank + 2 * group + member for member in range(2)] for group in range(2)]


@in_ranks(2)
def test_lists_of_groups_are_neither_nested_deeper_nor_flattened_unasked():
    rank = start().env.rank
    by_hand = [None, None]
    torch_dist.all_gather_object(by_hand, groups_of(rank))
    with pytest.raises(SampleError, match='group is a list'):
        gather_samples(by_hand, groups_of(rank))  # the order of arguments of all_gather_object
    # A list of ranks of lists of groups of lists: taken for groups, it has two.
    assert by_hand == [[[0, 1], [2, 3]], [[10, 11], [12, 13]]]
    assert gather_samples(groups_of(rank)) == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert gather_samples(groups_of(rank), flatten=True) == [0, 1, 2, 3, 10, 11, 12, 13]
