"""Host staging on torch_xla: memory, and ways to average that the tests of the card cover too."""

import pytest

from tests.gradients.test_compression import averages
from tests.gradients.test_nonfinite import train
from tests.gradients.test_staging import allocations
from tests.jobs import largest_difference
from tests.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.xla


def test_host_memory_is_at_most_a_quarter_more_than_the_gradients():
    for buffers, peak, places in run_ranks(allocations, 2, 'xla'):
        assert buffers == 1
        assert places == 1
        assert peak <= 0.25


def compressed(kind):
    return averages('xla', grad_compression=kind)


@pytest.mark.parametrize('kind', ['bf16', 'fp16'])
def test_half_precision(kind):
    exact = run_ranks(averages, 2, 'xla')
    rounded = run_ranks(compressed, 2, kind)
    for (expected, full), (found, half) in zip(exact, rounded):
        largest = max(abs(value).max() for value in expected.values())
        assert 0 < largest_difference(expected, found) <= 2**-7 * largest
        assert half == pytest.approx(full / 2, rel=0.01)


def test_bad_gradients_are_named():
    with pytest.raises(RanksFailed) as raised:
        run_ranks(train, 2, 'xla', 'stop', together=True)
    assert sorted(raised.value.errors) == [0, 1]
    for _, message, _ in raised.value.errors.values():
        assert 'rank 1: 2.weight (1 NaN, 0 Inf of 32)' in message


def test_bad_updates_are_skipped_by_all_ranks():
    (one, skipped), (other, _) = run_ranks(train, 2, 'xla', 'skip')
    assert skipped == 1
    assert largest_difference(one, other) == 0
    (expected, _), _ = run_ranks(left_out, 2)
    assert largest_difference(one, expected) <= 1e-6


def left_out():
    return train('xla', 'skip', left_out=True)
