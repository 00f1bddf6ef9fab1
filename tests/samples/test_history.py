"""Mistakes that people made when they shared samples by hand, beside what replaces them."""

import pytest
import torch
from torch import distributed as torch_dist

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DeviceMismatchError
from mmdevplug.samples import balance_samples, gather_samples, stack_samples
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


@in_ranks(2)
def test_samples_of_other_ranks_can_be_stacked():
    context = start('zeta')
    rank, device = context.env.rank, context.device
    mine = [dict(reward=torch.tensor(float(rank)).to(device))] * (3 if rank else 1)
    held_by_rank = [None, None]
    # What a pickle says of a tensor: its values, and the device that it left.
    torch_dist.all_gather_object(held_by_rank, [(float(s['reward']), str(device)) for s in mine])
    by_hand = [torch.tensor(value).to(place) for held in held_by_rank for value, place in held]
    with DeviceGuard('error'):
        with pytest.raises(DeviceMismatchError) as raised:
            torch.stack(by_hand)
        whole = stack_samples(gather_samples(mine), device)
        part = stack_samples(balance_samples(mine), device)
    assert 'zeta:0' in str(raised.value)
    assert 'zeta:1' in str(raised.value)
    assert {each['reward'].device for each in (whole, part)} == {device}
    assert whole['reward'].cpu().tolist() == [0.0, 1.0, 1.0, 1.0]
    assert part['reward'].cpu().tolist() == ([1.0, 1.0] if rank else [0.0, 1.0])
