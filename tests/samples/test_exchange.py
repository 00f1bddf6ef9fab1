"""Pools and slices over real gloo process groups."""

import pytest

from tests.columns import NATIVE, device_of, job_of
from tests.ranks import run_ranks

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
