"""What a rank holds and asks for beside what PyTorch's own ranks do, by the number of ranks."""

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


def test_each_rank_is_sent_its_own_queue():
    queues = {rank: f'queue {rank}' for rank in range(3)}
    sent = SentOneByOne(queues)
    assert sent == queues
    for rank in range(3):
        make, arguments = sent.__reduce__()
        assert make(*arguments) == {rank: f'queue {rank}'}
