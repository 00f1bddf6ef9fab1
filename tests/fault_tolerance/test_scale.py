"""What a rank holds and asks for beside what PyTorch's own ranks do, by the number of ranks."""

import os
import time

import pytest
import torch
from torch import distributed as torch_dist

from mmdevplug import init_device
from mmdevplug.cli.result_queues import SentOneByOne
from mmdevplug.distributed.staged_groups import staged_counterpart
from mmdevplug.fault_tolerance.failure import current_watch
from mmdevplug.fault_tolerance.host_events import HostEvents
from mmdevplug.utils.torch_compat import GETS_BYTES_SAFELY
from tests.jobs import torch_before
from tests.ranks import in_ranks, run_ranks


class Counting:
    """A store that counts the requests of each kind."""

    def __init__(self, store):
        self._store, self.counts = store, dict(set=0, add=0, get=0)

    def __getattr__(self, name):
        function = getattr(self._store, name)

        def counted(*args):
            self.counts[name] = self.counts.get(name, 0) + 1
            if args[0] == 'events':
                self.counts['events'] = self.counts.get('events', 0) + 1
            return function(*args)

        return counted


def count_requests(seconds, busy=True):
    """What a rank asks of the store that goes from phase to phase all the time, or is idle."""
    init_device('pytorch', 'cpu')
    watch = current_watch()
    counting = Counting(watch.watch_store)
    watch.watch_store = watch.heartbeat._store = watch.events._store = counting
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if busy:
            watch.heartbeat.enter_phase(f'iteration {time.monotonic()}')
        time.sleep(0.02)
    return watch.watch_store.counts


def test_few_operations_on_the_store():
    for counts in run_ranks(count_requests, 3, 8, False):
        counts.pop('events', None)  # which are counted by their kind, too
        # Each second two looks for events and half a beat, of two or three operations. Before
        # PyTorch 1.12 a beat is written and read as some 20 numbers.
        assert 1 <= sum(counts.values()) <= 8 * (44 if torch_before('1.12.0') else 4)


@pytest.mark.skipif(not GETS_BYTES_SAFELY, reason='this PyTorch writes a text in pieces')
def test_a_rank_writes_at_most_once_a_second():
    seconds = 6
    for counts in run_ranks(count_requests, 3, seconds):
        assert seconds / 2 <= counts['set'] <= seconds + 2
        assert counts['add'] <= 2


def test_one_rank_of_a_host_at_a_time_asks_for_events():
    """Four times a second at most, as an answer is good for a quarter of a second."""
    seconds, ranks = 6, 8
    asked = sum(counts.get('events', 0) for counts in run_ranks(count_requests, ranks, seconds))
    assert seconds / 2 <= asked <= 4 * seconds + ranks


def test_ranks_of_a_host_share_the_count_of_events():
    store = Counting(torch_dist.HashStore())
    one, other = (HostEvents(store, 'a host', pause=100) for _ in range(2))
    for each in (one, other):
        each.begin()
        assert each.count() == 0
    store.add('events', 1)  # of another host
    asked = store.counts['events']
    assert (one.count(), other.count()) == (0, 0)
    assert store.counts['events'] == asked
    one.add()
    assert (other.count(), one.count()) == (2, 2)
    assert store.counts['events'] == asked + 2  # one to add, one to ask


def test_ranks_without_shared_memory_ask_by_themselves(monkeypatch):
    def fail(*args):
        raise OSError(28, 'no room')

    monkeypatch.setattr(os, 'posix_fallocate', fail)
    store = torch_dist.HashStore()
    one, other = (HostEvents(store, 'a host', pause=100) for _ in range(2))
    for each in (one, other):
        each.begin()
    assert one.count() == 0
    store.add('events', 1)
    assert (one.count(), other.count()) == (0, 1)


@pytest.mark.skipif(torch_before('2.8.0'), reason='this PyTorch connects all ranks of a group')
@in_ranks(12)
def test_a_second_group_does_not_connect_all_ranks():
    """Descriptors of a rank before it has a group that averages, with it, and after a sum."""
    init_device('pytorch', 'cpu')
    torch_dist.barrier()
    before = len(os.listdir('/proc/self/fd'))
    group = staged_counterpart()
    made = len(os.listdir('/proc/self/fd'))
    total = torch.full((1 << 18,), 1.0)
    torch_dist.all_reduce(total, group=group)
    summed = len(os.listdir('/proc/self/fd'))
    torch_dist.barrier()
    assert total.unique().tolist() == [12]
    # Gloo's own six, the neighbours in the ring, and the memory that all ranks share.
    assert before < made <= summed < before + 11


def test_each_rank_is_sent_its_own_queue():
    queues = {rank: f'queue {rank}' for rank in range(3)}
    sent = SentOneByOne(queues)
    assert sent == queues
    for rank in range(3):
        make, arguments = sent.__reduce__()
        assert make(*arguments) == {rank: f'queue {rank}'}
