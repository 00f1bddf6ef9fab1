"""Mistakes that people made when they shared samples by hand, beside what replaces them."""

import pytest
import torch
from torch import distributed as torch_dist

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.errors import DeviceMismatchError
from mmdevplug.samples import balance_samples, gather_samples, stack_samples
from tests.jobs import start
from tests.ranks import run_ranks


def groups_of(rank):
    """Two groups of two samples each."""
    return [[10 * rank + 2 * group + member for member in range(2)] for group in range(2)]


def gather_nested():
    rank = start().env.rank
    by_hand = [None, None]
    torch_dist.all_gather_object(by_hand, groups_of(rank))
    with pytest.raises(Exception, match='group is a list'):
        gather_samples(by_hand, groups_of(rank))  # the order of arguments of all_gather_object
    return by_hand, gather_samples(groups_of(rank)), gather_samples(groups_of(rank), flatten=True)


def test_lists_of_groups_are_neither_nested_deeper_nor_flattened_unasked():
    for by_hand, pool, flat in run_ranks(gather_nested, 2):
        # A list of ranks of lists of groups of lists: taken for groups, it has two.
        assert by_hand == [[[0, 1], [2, 3]], [[10, 11], [12, 13]]]
        assert pool == [[0, 1], [2, 3], [10, 11], [12, 13]]
        assert flat == [0, 1, 2, 3, 10, 11, 12, 13]


def stack_pool():
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
    return (
        str(raised.value),
        [each['reward'].cpu().tolist() for each in (whole, part)],
        {str(each['reward'].device) for each in (whole, part)},
    )


def test_samples_of_other_ranks_can_be_stacked():
    for rank, (text, values, devices) in enumerate(run_ranks(stack_pool, 2)):
        assert 'zeta:0' in text
        assert 'zeta:1' in text
        assert values == [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0] if rank == 0 else [1.0, 1.0]]
        assert devices == {f'zeta:{rank}'}
