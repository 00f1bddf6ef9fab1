"""What another thread, another rank or an interrupt does between two steps of a group."""

import mmap
import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as torch_dist

from mmdevplug.errors import StagedError
from mmdevplug.staged import StagedProcessGroup, shared_sum
from mmdevplug.staged.shared_memory import parts_of
from mmdevplug.staged.shared_sum import SharedSums, memory_size
from mmdevplug.staged.work import StagedWork

from .test_collectives import pytestmark  # noqa: F401

SHORT = timedelta(milliseconds=20)


class Endless:
    """A work of gloo that another rank does not come for."""

    def __init__(self):
        self.waits, self.ends = threading.Event(), threading.Event()

    def is_completed(self):
        return False

    def wait(self, timeout=None):
        self.waits.set()
        assert self.ends.wait(5), 'nobody was to wait for this'


class EndsInBetween:
    """A work that ends, maybe with an error, just after it was asked whether it has."""

    def __init__(self, error=None):
        self.asked, self.error = 0, error

    def wait(self, timeout=None):
        if self.asked == 0:
            raise RuntimeError('Operation timed out!')
        if self.error is not None:
            raise self.error

    def is_completed(self):
        self.asked += 1
        return self.asked > 1


def make_work(*begins, of=StagedWork):
    def explain(error, number=0):
        assert 'timed out' not in str(error), 'who looks again explains nothing'
        return repr(error)

    group = SimpleNamespace(
        works={}, dropped=[], describe=lambda *_: 'all_reduce', explain=explain, ending=False
    )
    work = of(group, 'all_reduce', [], [])
    work.begins = list(begins)
    return work


def begun(*begins):
    work = make_work(*begins)
    work.begin()
    return work


def in_thread(function, *arguments):
    """Run a function that may wait for ever; returns what it raises."""
    raised = []

    def run():
        try:
            function(*arguments)
        except BaseException as error:  # of any kind: the test says which
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), f'{function} waits for ever'
    return raised


@pytest.mark.parametrize('coalesced', [False, True])
def test_a_work_that_ends_while_a_thread_looks_is_no_failure(coalesced):
    work = begun(EndsInBetween())
    work = begun(work) if coalesced else work
    assert 'timed out' in str(work.end(SHORT))
    assert work.end(SHORT) is None
    assert work.exception() is None
    assert work.is_success()


def test_the_error_of_a_work_that_ends_while_a_thread_looks_is_told():
    work = begun(EndsInBetween(RuntimeError('connection reset')))
    for _ in range(2):
        work.end(SHORT)
    with pytest.raises(StagedError, match='all_reduce failed: .*connection reset'):
        work.wait()
    assert not work.is_success()


class BeginsWhenAsked(StagedWork):
    """A work that a thread begins when another asks whether it has ended."""

    begun = None

    @property
    def begins(self):
        if self.begun is not None:
            self._works, self.begun = [self.begun], None
        return ()

    @begins.setter
    def begins(self, begins):
        self.begun = begins[0] if begins else None


def test_asking_whether_a_work_has_ended_does_not_wait_for_one_that_begins():
    assert not make_work(Endless(), of=BeginsWhenAsked).is_completed()


def test_a_limit_counts_while_another_thread_waits_without_one():
    endless = Endless()
    work = begun(endless)
    thread = threading.Thread(target=work.wait, daemon=True)
    thread.start()
    assert endless.waits.wait(5)
    found = []
    assert in_thread(lambda: found.append(work.end(SHORT))) == []
    assert 'timed out' in str(found[0])
    endless.ends.set()
    thread.join(5)
    assert work.end(SHORT) is None


@pytest.mark.parametrize('error', [KeyboardInterrupt(), ValueError('no such value')])
def test_results_that_were_not_all_copied_are_never_taken_for_copied(error):
    def fail():
        raise error

    work = begun()
    work.buffers.due = [fail]
    with pytest.raises((KeyboardInterrupt, StagedError)):
        work.wait()
    with pytest.raises(StagedError, match=type(error).__name__):
        work.wait()
    assert not work.is_success()


def group_of_one(path):
    return StagedProcessGroup(torch_dist.FileStore(str(path), 1), 0, 1, timedelta(seconds=5))


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError])
def test_what_could_not_begin_is_told(error, tmp_path):
    group = group_of_one(tmp_path / 'store')

    def fail():
        raise error('no copy')

    work = StagedWork(group, 'all_reduce', [], [])
    work.begins = [fail]
    group._deferred.append(work)
    if error is KeyboardInterrupt:  # in the main thread, which goes on then
        with pytest.raises(KeyboardInterrupt):
            group.begin_deferred()
    with pytest.raises((StagedError, KeyboardInterrupt), match='no copy'):
        work.wait()
    assert work.exception() is not None
    group.shutdown()


def test_a_future_that_is_asked_for_after_the_end_is_done(tmp_path):
    group = group_of_one(tmp_path / 'store')
    tensor = torch.ones(2)
    work = group.allreduce([tensor])
    work.wait()
    group.shutdown()
    assert work.get_future().done()
    with pytest.raises(StagedError, match='the group has ended'):
        group.monitored_barrier()


def test_no_thread_is_forgotten_when_two_are_started_at_a_time(tmp_path):
    group, ends = group_of_one(tmp_path / 'store'), threading.Event()

    class StartsAnother:
        asked = False

        def is_alive(self):
            if not self.asked:
                self.asked = True
                group.start_thread(ends.wait)
            return True

        def join(self, timeout):
            pass

    group._threads[StartsAnother()] = None
    group.start_thread(ends.wait)
    assert len([thread for thread in group._threads if thread.is_alive()]) == 3
    ends.set()
    group.shutdown()


def two_ranks():
    """The sums of two ranks of this process, which nothing but the test takes steps of."""
    parts = parts_of(mmap.mmap(-1, 2 * memory_size(2)), dict.fromkeys(range(2), os.getpid()))
    limit = timedelta(seconds=1)
    return [SharedSums(parts, rank, None, 2, limit, lambda _: True) for rank in range(2)]


def test_a_rank_that_leaves_after_its_last_step_is_not_missed(monkeypatch):
    here, there = two_ranks()
    other = there.begin(torch.ones(64), False)
    its = here.begin(torch.ones(64), False)

    def ends_now(pid):
        there.finish(other)
        there.close()
        return False

    monkeypatch.setattr(shared_sum, 'has_ended', ends_now)
    here._look(its, 0.0, 5.0)
    here.finish(its)
    assert its.error is None
    assert its.flat.tolist() == [2.0] * 64


def test_a_rank_that_leaves_before_is_missed():
    here, there = two_ranks()
    its = here.begin(torch.ones(64), False)
    there.close()
    (error,) = in_thread(its.wait)
    assert 'rank 1 (process' in str(error)
    assert 'left the group' in str(error)


@pytest.mark.parametrize('step', ['_write', '_add', '_read'])
@pytest.mark.parametrize('error', [RuntimeError, ValueError, KeyboardInterrupt])
def test_a_step_that_fails_ends_all_sums(step, error):
    here, there = two_ranks()

    def fail(*_):
        raise error('the card is gone')

    its = here.begin(torch.ones(64), False)
    setattr(here, step, fail)
    there.begin(torch.ones(64), False)
    if step == '_write':
        with pytest.raises((KeyboardInterrupt, RuntimeError), match='the card is gone'):
            here.begin(torch.ones(64), False).wait()
    for _ in range(2):
        (told,) = in_thread(its.wait) if step != '_read' else in_thread(take_turns, its, there)
        assert 'the card is gone' in str(told)
    with pytest.raises(RuntimeError, match='the card is gone'):
        here.begin(torch.ones(64), False)


def take_turns(its, other):
    its.is_completed()
    other.advance()
    its.wait()


@pytest.mark.parametrize(
    ('writes', 'next_writes', 'waits'),
    [(False, False, 0), (False, True, 1), (True, False, 1), (True, True, 1)],
)
def test_a_tensor_is_written_when_earlier_collectives_are_done_with_it(writes, next_writes, waits):
    tensor, waited = torch.ones(2), []
    earlier = SimpleNamespace(
        read=[tensor],
        written=[tensor] * writes,
        is_completed=lambda: False,
        wait=lambda: waited.append(True),
    )
    group = SimpleNamespace(works={0: earlier})
    StagedProcessGroup._finish_before(group, [tensor], [tensor] * next_writes)
    assert len(waited) == waits
