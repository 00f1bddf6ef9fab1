"""What a rank holds and asks for beside what PyTorch's own ranks do, by the number of ranks."""

import os
import time

import pytest

from mmdevplug import init_device
from mmdevplug.cli.result_queues import SentOneByOne
from mmdevplug.fault_tolerance.failure import current_watch
from mmdevplug.utils.torch_compat import GETS_BYTES_SAFELY
from tests.ranks import run_ranks


class Counting:
    """A store that counts the requests of each kind."""

    def __init__(self, store):
        self._store, self.counts = store, dict(set=0, add=0, get=0)

    def __getattr__(self, name):
        function = getattr(self._store, name)

        def counted(*args):
            self.counts[name] = self.counts.get(name, 0) + 1
            return function(*args)

        return counted


def count_requests(seconds):
    """What a rank asks of the store while it goes from phase to phase all the time."""
    init_device('pytorch', 'cpu')
    watch = current_watch()
    watch.watch_store = watch.heartbeat._store = Counting(watch.watch_store)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        watch.heartbeat.enter_phase(f'iteration {time.monotonic()}')
        time.sleep(0.02)
    return watch.watch_store.counts


@pytest.mark.skipif(not GETS_BYTES_SAFELY, reason='this PyTorch writes a text in pieces')
def test_a_rank_writes_at_most_once_a_second():
    seconds = 6
    for counts in run_ranks(count_requests, 3, seconds):
        assert seconds / 2 <= counts['set'] <= seconds + 2
        assert counts['add'] <= 2


def count_descriptors():
    from torch import distributed as torch_dist

    from mmdevplug.distributed.staged_groups import staged_counterpart

    init_device('pytorch', 'cpu')
    torch_dist.barrier()
    before = len(os.listdir('/proc/self/fd'))
    torch_dist.barrier(staged_counterpart())
    return len(os.listdir('/proc/self/fd')) - before


@pytest.mark.skipif(not os.path.isdir('/proc/self/fd'), reason='descriptors are counted in /proc')
def test_a_second_group_does_not_connect_all_ranks():
    pytest.importorskip('torch', minversion='2.9')
    found = {ranks: max(run_ranks(count_descriptors, ranks)) for ranks in (4, 12)}
    assert found[12] - found[4] < 12 - 4


def test_each_rank_is_sent_its_own_queue():
    queues = {rank: f'queue {rank}' for rank in range(3)}
    sent = SentOneByOne(queues)
    assert sent == queues
    for rank in range(3):
        make, arguments = sent.__reduce__()
        assert make(*arguments) == {rank: f'queue {rank}'}
