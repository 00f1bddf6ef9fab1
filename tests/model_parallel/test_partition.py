"""The split against all splits, and its properties on long sequences."""

import random

import numpy as np
import pytest

from mmdevplug.model_parallel.partition import Partition
from tests.model_parallel.brute import best_score, score


def draw(rng):
    count, parts = rng.randint(1, 9), rng.randint(1, 4)
    largest = rng.choice([1, 3, 20, 10**10])
    sizes = [rng.randint(1, largest) for _ in range(count)]
    weights = rng.choice([[1] * parts, [rng.randint(1, 5) for _ in range(parts)]])
    limits = [
        rng.choice([float('inf'), rng.randint(0, max(1, sum(sizes)))])
        if rng.random() < 0.4
        else float('inf')
        for _ in range(parts)
    ]
    costs = [rng.randint(0, 5) for _ in range(count)]
    return sizes, weights, limits, costs, rng.random() < 0.4


@pytest.mark.parametrize('seed', range(8))
def test_no_split_is_better(seed):
    rng = random.Random(seed)
    for _ in range(120):
        sizes, weights, limits, costs, allow_empty = draw(rng)
        expected = best_score(sizes, weights, limits, costs, allow_empty)
        ends = Partition(sizes, weights, limits, costs, allow_empty).best()
        case = (sizes, weights, limits, costs, allow_empty)
        assert (ends is None) == (expected is None), case
        if ends is not None:
            found = score(sizes, weights, costs, ends)
            judged = 2 if allow_empty else 5
            assert found[:judged] == expected[:judged], (case, ends)


def table_bottleneck(sizes, weights):
    """The least bottleneck, by a table over all prefixes and devices."""
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(float)
    best = np.full(len(ends), np.inf)
    best[0] = 0.0
    for weight in weights:
        loads = (ends[None, :] - ends[:, None]) / weight
        loads[np.tril_indices(len(ends))] = np.inf  # no part is empty
        best = np.maximum(best[:, None], loads).min(axis=0)
    return best[-1]


@pytest.mark.parametrize('weights', [[1] * 8, [3, 1, 4, 1, 5, 9, 2, 6], [1e10, 8e9, 8e9]])
def test_long_sequences_reach_the_table(weights):
    rng = random.Random(1)
    sizes = [rng.choice([10**3, 10**7, rng.randint(1, 10**9)]) for _ in range(400)]
    partition = Partition(sizes, weights)
    ends = partition.best()
    found = max(load / weight for load, weight in zip(partition.loads(ends), weights))
    assert found == pytest.approx(table_bottleneck(sizes, weights), rel=1e-12)


def test_a_small_device_gets_the_small_block():
    # Filling device after device would leave the large block to the small one.
    assert Partition([1, 1, 100], [2, 1, 100]).best() == [1, 2, 3]


def test_a_large_block_does_not_leave_the_others_uneven():
    # Two devices share what the first cannot take; one of them would get 1 by the cuts alone.
    sizes, costs = [20, *[1] * 8], [0, 0, 9, 9, 9, 9, 9, 9, 0]
    split = Partition(sizes, [1, 1, 1], cut_costs=costs)
    assert split.loads(split.best()) == [20, 4, 4]


def test_cheaper_cuts_win_among_equals():
    # Both splits are equally even; the second cut is the cheaper one.
    for more in ({}, dict(allow_empty=True)):
        assert Partition([2, 1, 2], [1, 1], cut_costs=[0, 9, 1], **more).best() == [2, 3]
        assert Partition([2, 1, 2], [1, 1], cut_costs=[0, 1, 9], **more).best() == [1, 3]


@pytest.mark.parametrize(
    ('sizes', 'weights', 'ends'),
    [([10**6] * 2, [1e6, 2e9], [1, 2]), ([10**12, *[1] * 599], [1.0] * 600, list(range(1, 601)))],
)
def test_search_ends_where_the_largest_load_is_far_above_the_ideal(sizes, weights, ends):
    assert Partition(sizes, weights).best() == ends


def test_search_ends_with_many_devices_that_may_stay_empty():
    partition = Partition([10**12, 1, 1], [1.0] * 1000, allow_empty=True)
    assert max(partition.loads(partition.best())) == 10**12


@pytest.mark.filterwarnings('error')
def test_blocks_without_bytes_are_on_a_device():
    for count in (1, 2, 5):
        assert Partition([0] * count, [1e6, 2e6, 3e6], allow_empty=True).best()[-1] == count
