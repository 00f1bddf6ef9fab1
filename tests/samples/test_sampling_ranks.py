"""Ranks that sample together: a job that once failed in four ways, replayed."""

import os
from functools import partial

import pytest
import torch
from torch import distributed as torch_dist

from mmdevplug.accelerators import enter_rank_device
from mmdevplug.errors import SampleError
from mmdevplug.samples import DynamicSampler, sampler as module
from tests.columns import CUDA, NATIVE, device_of, job_of
from tests.jobs import start
from tests.ranks import in_ranks, run_ranks

PER_GROUP, TARGET = 8, 64
#: For each rank the valid groups of its rounds: 7 of 8 at first, and the last one on rank 0.
VALID = [(2, 1, 2), (2, 0, 2), (1, 0, 2), (2, 0, 2)]


class Answers:
    """Two groups of answers in each round, on this rank's device."""

    def __init__(self, valid):
        self.device = enter_rank_device()[1]
        self.rank, self.valid, self.round = int(os.environ['RANK']), list(valid), 0

    def generate(self):
        if self.round >= len(self.valid):
            raise StopIteration
        valid, first = self.valid[self.round], 1000 * self.rank + 100 * self.round
        self.round += 1
        return [
            dict(
                id=torch.tensor(first + index, device=self.device),
                rewards=torch.tensor(
                    [float(index % 2 and index // PER_GROUP < valid), 1.0], device=self.device
                ),
                prompt=f'{self.rank}',
                prompt_ids=[first + index] * (1 + index % 3),
                completion=torch.full((first % 4 + index,), index, device=self.device),
            )
            for index in range(2 * PER_GROUP)
        ]

    @staticmethod
    def is_valid(group):
        assert all(sample['rewards'].device.type == 'cpu' for sample in group)
        return torch.stack([sample['rewards'][0] for sample in group]).var() > 0


def replay(accelerator):
    rank = start(accelerator).env.rank
    lines = []
    module.log = lambda line, *_: lines.append(line)
    answers = Answers(VALID[rank])
    sampler = DynamicSampler(answers.generate, answers.is_valid, TARGET, 3, PER_GROUP)
    batch = next(sampler)
    assert batch['rewards'].device == batch['id'].device == enter_rank_device()[1]
    return dict(
        ids=batch['id'].tolist(),
        shape=tuple(batch['rewards'].shape),
        device=str(batch['rewards'].device),
        prompts=batch['prompt'],
        prompt_ids=batch['prompt_ids'],
        completions=[each.tolist() for each in batch['completion']],
        completion_devices={str(each.device) for each in batch['completion']},
        rounds=answers.round,
        report=sampler.last,
        lines=lines,
        next=next(sampler)['id'].tolist(),
    )


@pytest.fixture(scope='module', params=['cpu', 'zeta', NATIVE, CUDA])
def replayed(request):
    return request.param, run_ranks(replay, 4, request.param, **job_of(request.param, 4))


def ids(*groups):
    """Of groups that are given as rank, round, number in the round."""
    return [
        1000 * rank + 100 * number + index * PER_GROUP + i
        for rank, number, index in groups
        for i in range(PER_GROUP)
    ]


def test_all_ranks_draw_in_the_same_rounds(replayed):
    _, found = replayed
    # By its own count every rank but rank 2 has enough after the first round.
    assert [rank['report'].resamples for rank in found] == [1] * 4
    assert [rank['report'].by_rank for rank in found] == [(24, 16, 8, 16)] * 4
    assert [rank['rounds'] for rank in found] == [2] * 4
    lines = found[0]['lines']
    assert lines[:2] == ['Sampling, pool 1: initial: 56/64', 'Sampling, pool 1: resample 1: 64/64']
    assert '[0:16] [16:32] [32:48] [48:64] of 64 samples after 1 resample(s); 0' in lines[2]
    assert [rank['lines'] for rank in found[1:]] == [[]] * 3


def test_the_pool_is_shared_across_ranks(replayed):
    _, found = replayed
    assert [rank['report'].slice for rank in found] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert [rank['shape'] for rank in found] == [(16, 2)] * 4
    assert [rank['ids'] for rank in found] == [
        ids((0, 0, 0), (0, 0, 1)),
        ids((0, 1, 0), (1, 0, 0)),
        ids((1, 0, 1), (2, 0, 0)),
        ids((3, 0, 0), (3, 0, 1)),
    ]
    assert [sorted(set(rank['prompts'])) for rank in found] == [
        ['0'],
        ['0', '1'],
        ['1', '2'],
        ['3'],
    ]
    # In the next pool everybody has a share.
    assert [rank['next'] for rank in found] == [ids((r, 2, 0), (r, 2, 1)) for r in range(4)]


def test_tensors_are_on_the_device_of_their_rank(replayed):
    accelerator, found = replayed
    expected = [device_of(accelerator, rank, 4) for rank in range(4)]
    assert [rank['device'] for rank in found] == expected
    assert [rank['completion_devices'] for rank in found] == [{device} for device in expected]


def test_what_differs_in_length_is_a_list_for_each_sample(replayed):
    _, found = replayed
    for rank in found:
        indices = [number % 100 for number in rank['ids']]
        assert rank['prompt_ids'] == [
            [number] * (1 + index % 3) for number, index in zip(rank['ids'], indices)
        ]
        # Each rank has samples of two lengths or more; 1000 and 100 are multiples of 4.
        assert rank['completions'] == [[index] * index for index in indices]


def sample_until_the_end(valid, **options):
    rank = start().env.rank
    answers = Answers(valid[rank])
    sampler = DynamicSampler(answers.generate, answers.is_valid, 32, 3, PER_GROUP, **options)
    return [(batch['id'].tolist(), sampler.last) for batch in sampler], answers.round


def test_a_rank_without_data_gets_its_share_until_all_have_ended():
    valid = [(2, 2, 2, 1), (2,)]
    first, second = run_ranks(sample_until_the_end, 2, valid)
    # Rank 1 has drawn once; it takes part in 4 rounds more with nothing.
    assert (first[1], second[1]) == (4, 1)
    assert [batch for batch, _ in first[0]] == [
        ids((0, 0, 0), (0, 0, 1)),
        ids((0, 1, 0), (0, 1, 1)),
    ]
    assert [batch for batch, _ in second[0]] == [
        ids((1, 0, 0), (1, 0, 1)),
        ids((0, 2, 0), (0, 2, 1)),
    ]
    # Rank 0's last group is dropped, for both at the same time.
    assert len(first[0]) == len(second[0]) == 2


def test_too_few_on_two_ranks():
    shares = [[(0, 0, 0)], [(0, 0, 1)]]
    found = run_ranks(partial(sample_until_the_end, on_short='fewer'), 2, [(2,), (1,)])
    assert [batches[0][0] for batches, _ in found] == [ids(*groups) for groups in shares]
    assert [batches[0][1].short for batches, _ in found] == ['fewer'] * 2
    assert [len(batches) for batches, _ in found] == [1, 1]


@in_ranks(4)
def test_groups_of_ranks_have_pools_of_their_own():
    rank = start().env.rank
    pairs = [torch_dist.new_group([0, 2]), torch_dist.new_group([1, 3])]
    with pytest.raises(SampleError, match='is not in the process group'):
        DynamicSampler(list, bool, 16, group=pairs[1 - rank % 2])
    # The pairs need different numbers of rounds.
    answers = Answers([2] if rank % 2 else [0, 1, 1, 1])
    sampler = DynamicSampler(
        answers.generate, answers.is_valid, 32, 5, PER_GROUP, group=pairs[rank % 2]
    )
    groups = [(rank, 0, 0), (rank, 0, 1)] if rank % 2 else [(rank, 1, 0), (rank, 2, 0)]
    assert next(sampler)['id'].tolist() == ids(*groups)
    assert sampler.last.resamples == (0 if rank % 2 else 2)


@in_ranks(2)
def test_ranks_must_agree_on_what_they_want():
    answers = Answers([2] * (start().env.rank + 2))
    target = 32 + 16 * answers.rank
    sampler = DynamicSampler(answers.generate, answers.is_valid, target, 3, PER_GROUP)
    with pytest.raises(SampleError, match='target=48 on rank 1 of 2, but 32 on rank 0 of 2'):
        next(sampler)


@in_ranks(2)
def test_a_target_that_ranks_cannot_share():
    start()
    words = '40 samples in groups of per_group=8 cannot be shared evenly by 2 rank'
    with pytest.raises(SampleError, match=words) as raised:
        DynamicSampler(list, bool, 40, per_group=8)
    assert 'a multiple of 16, such as 48' in str(raised.value)
