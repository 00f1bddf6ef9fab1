"""Memory that does not suffice: the message names what holds it and what to try."""

import resource

import psutil
import pytest
import torch

from mmdevplug.errors import DevPlugError
from mmdevplug.explanations.out_of_memory import out_of_memory_at
from tests.hooks.memory_jobs import build
from tests.ranks import RanksFailed, run_ranks

MB = 2**20


def limit_host(megabytes):
    """Let this process map so much more than it has."""
    limit = psutil.Process().memory_info().vms + megabytes * MB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def train_on_a_full_host(work_dir):
    runner = build(work_dir, model=dict(hidden=400_000), batch_size=64, iterations=3)
    limit_host(200)  # a hidden layer of the batch is 98 MB
    runner.train()


def train_on_a_full_card(work_dir, megabytes, hidden, batch_size, poor_rank=None):
    import os

    runner = build(
        work_dir, 'zeta', model=dict(hidden=hidden), batch_size=batch_size, iterations=20
    )
    if poor_rank is None or os.environ['RANK'] == str(poor_rank):
        torch.zeta.set_limit(megabytes * MB)
    runner.train()


def failure(function, ranks, *args):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(function, ranks, *args)
    return failed.value.errors


def test_the_host_is_full(tmp_path):
    kind, message, trace = failure(train_on_a_full_host, 0, tmp_path)[0]
    assert kind == 'DeviceOutOfMemoryError'
    assert 'rank 0: cpu has no memory left in train with' in message
    assert "can't allocate memory" in message
    assert 'net.0.weight (400000, 8)' in message
    assert 'train_dataloader.batch_size is 64: try 32' in message
    assert 'accumulative_counts=2' in message
    assert '--amp' in message
    assert 'DefaultCPUAllocator' in trace  # PyTorch's own error is the cause


def test_a_card_is_full_of_samples(tmp_path):
    # 16 samples of 100,000 elements: 6.1 MB a layer.
    kind, message, _ = failure(train_on_a_full_card, 0, tmp_path, 20, 100_000, 16)[0]
    assert kind == 'DeviceOutOfMemoryError'
    assert 'rank 0: zeta:0 has no memory left in train' in message
    assert 'of 20.00 MiB: fakecard out of memory. Tried to allocate' in message
    assert 'train_dataloader.batch_size is 16: try 8' in message
    assert 'net.0.weight (100000, 8)' in message


def test_a_card_is_full_of_what_no_batch_size_changes(tmp_path):
    kind, message, _ = failure(train_on_a_full_card, 0, tmp_path, 13, 100_000, 1)[0]
    assert kind == 'DeviceOutOfMemoryError'
    assert 'net.0.weight (100000, 8) with its gradient' in message
    assert 'does not depend on train_dataloader.batch_size (it is 1)' in message
    assert 'an optimizer with less state' in message


def test_all_ranks_learn_which_one_was_full(tmp_path):
    errors = failure(train_on_a_full_card, 2, tmp_path, 20, 100_000, 16, 1)
    assert errors[1][0] == 'DeviceOutOfMemoryError'
    assert errors[0][0] == 'RankFailedError'
    assert 'train_dataloader.batch_size is 16: try 8' in errors[1][1]
    assert 'rank 1' in errors[0][1]
    assert 'fakecard out of memory' in errors[0][1]


@pytest.mark.parametrize(
    ('error', 'place'),
    [
        (RuntimeError('CUDA out of memory. Tried to allocate 20.00 MiB'), 'device'),
        (RuntimeError('NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; ...)'), 'device'),
        (RuntimeError('Bad StatusOr access: RESOURCE_EXHAUSTED: Attempting to ...'), 'device'),
        (RuntimeError('std::bad_alloc'), 'host'),
        (MemoryError('Unable to allocate 7.45 GiB for an array'), 'host'),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 'host'),
        (RuntimeError('mat1 and mat2 shapes cannot be multiplied'), None),
        (DevPlugError('out of memory'), None),
    ],
)
def test_errors_are_distinguished(error, place):
    assert out_of_memory_at(error) == place


def test_pytorchs_own_class_is_known():
    if not hasattr(torch.cuda, 'OutOfMemoryError'):
        pytest.skip('this class came with torch 1.13')
    assert out_of_memory_at(torch.cuda.OutOfMemoryError('')) == 'device'


def train_with_another_error(work_dir):
    runner = build(work_dir, iterations=2)
    runner.train_loop.run = lambda: (_ for _ in ()).throw(KeyError('out of memory'))
    runner.train()


def test_other_errors_stay_what_they_are(tmp_path):
    kind, message, _ = failure(train_with_another_error, 0, tmp_path)[0]
    assert (kind, message) == ('KeyError', "'out of memory'")
