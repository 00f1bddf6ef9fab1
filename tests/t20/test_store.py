"""`Store.get` of PyTorch 1.10 crashes beside other threads, so nothing here may call it."""

import pytest
from torch import distributed as torch_dist

from tests.jobs import PLAIN, train_digits
from tests.ranks import RanksFailed, run_ranks
from tests.t20.conftest import ON_T20

pytestmark = ON_T20


def _crash(store, key):
    raise AssertionError(f'Store.get({key!r}) creates a Python object without the lock')


def forbid_get():
    for kind in (torch_dist.Store, torch_dist.TCPStore, torch_dist.PrefixStore):
        kind.get = _crash


def train(work_dir, fails_on=None):
    from mmdevplug.distributed.waiting import decide_together, run_on_main

    forbid_get()
    result = train_digits('cpu', work_dir, **PLAIN)
    rank = torch_dist.get_rank()
    found = decide_together('counting', rank, sum), run_on_main('naming', lambda: 'main')
    if rank == fails_on:
        raise ValueError('this rank has had enough')
    if fails_on is not None:
        run_on_main('waiting', lambda: 'never')
    return result['staged'], found


def test_training_and_messages_between_ranks(tmp_path):
    results = run_ranks(train, 2, tmp_path)
    assert results == [(False, (1, 'main'))] * 2


def test_failures_of_other_ranks(tmp_path):
    with pytest.raises(RanksFailed) as raised:
        run_ranks(train, 2, tmp_path, 0)
    assert 'this rank has had enough' in str(raised.value)
    assert 'without the lock' not in str(raised.value)
