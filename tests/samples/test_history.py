"""Mistakes that people made when they shared samples by hand, beside what replaces them."""

import pytest
from torch import distributed as torch_dist

from mmdevplug.samples import gather_samples
from tests.jobs import start
from tests.ranks import in_ranks


def groups_of(rank):
    """Two groups of two samples each."""
    return [[10 * rank + 2 * group + member for member in range(2)] for group in range(2)]


@in_ranks(2)
def test_lists_of_groups_are_neither_nested_deeper_nor_flattened_unasked():
    rank = start().env.rank
    by_hand = [None, None]
    torch_dist.all_gather_object(by_hand, groups_of(rank))
    with pytest.raises(Exception, match='group is a list'):
        gather_samples(by_hand, groups_of(rank))  # the order of arguments of all_gather_object
    # A list of ranks of lists of groups of lists: taken for groups, it has two.
    assert by_hand == [[[0, 1], [2, 3]], [[10, 11], [12, 13]]]
    assert gather_samples(groups_of(rank)) == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert gather_samples(groups_of(rank), flatten=True) == [0, 1, 2, 3, 10, 11, 12, 13]
