"""A rank that dies, or never comes, while the others exchange samples: it is named."""

import os
import signal
import time

import pytest
import torch

from mmdevplug import samples as exchanges
from mmdevplug.fault_tolerance import failure, failure_watch
from tests.jobs import start
from tests.ranks import errors_of_ranks


def exchange(name, accident, timeout=60):
    """Exchange twice; before the second time something happens to rank 1."""
    failure_watch.STOP_SECONDS = 1.0
    rank = start(timeout=timeout).env.rank
    samples = [dict(x=torch.full((1 << 17,), float(rank)))] * (6 if rank == 1 else 1)
    with failure.fail_together('training'):
        for turn in range(2):
            if rank == 1 and turn == 1:
                accident()
            getattr(exchanges, name)(samples)


def die(name):
    exchange(name, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stay_away(name):
    exchange(name, lambda: time.sleep(3600), timeout=4)


@pytest.mark.parametrize('name', ['gather_samples', 'balance_samples'])
@pytest.mark.parametrize('accident', [die, stay_away])
def test_the_rank_is_named(name, accident):
    errors = errors_of_ranks(accident, 3, name, timeout=100, together=True)
    assert errors.pop(1)[0] == 'Died'
    assert sorted(errors) == [0, 2]
    for kind, message in errors.values():
        assert kind == 'RankFailedError'
        assert 'because of rank 1 of 3' in message
