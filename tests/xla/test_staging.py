"""Host staging on torch_xla: memory, and ways to average that the tests of the card cover too."""

import pytest

from tests.columns import job_of
from tests.gradients.averaging import allocations
from tests.gradients.test_compression import averages, check_rounded
from tests.gradients.test_nonfinite import train
from tests.ranks import errors_of_ranks, run_ranks

pytestmark = pytest.mark.xla


def test_shared_memory_is_allocated_once():
    for found in run_ranks(allocations, 2, 'xla', **job_of('xla', 2)):
        assert found[0] == found[1] == found[2]
        assert sum(size for size, _ in found[0]) <= 64 << 20


def test_bfloat16_rounds():
    check_rounded(run_ranks(averages, 2, 'xla', 'none'), run_ranks(averages, 2, 'xla', 'bf16'))


def test_bad_gradients_are_named():
    errors = errors_of_ranks(train, 2, 'xla', 'stop', together=True)
    assert sorted(errors) == [0, 1]
    for _, message in errors.values():
        assert 'rank 1: 2.weight (1 NaN, 0 Inf of 32)' in message
