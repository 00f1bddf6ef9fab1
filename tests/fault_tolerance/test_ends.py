"""How ranks end: process groups first, then the failure watch, then the interpreter.

``MMDEVPLUG_STARTS`` says how many jobs of four ranks are started and ended, 6 by default.
"""

import json
import os
import sys
import threading

import pytest
from torch import distributed as torch_dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mmdevplug import init_device
from mmdevplug.distributed import process_group
from mmdevplug.fault_tolerance import failure
from mmdevplug.fault_tolerance.ended_ranks import describe_end
from tests.commands import environment, run
from tests.jobs import ROOT
from tests.ranks import in_ranks

STARTS = int(os.environ.get('MMDEVPLUG_STARTS', '6'))


@pytest.mark.long
@pytest.mark.timeout(120 + 60 * STARTS)
def test_no_rank_ends_with_another_status():
    """Once in a while a rank was aborted at its very end: "terminate called without ..."."""
    done = run(
        *(sys.executable, '-m', 'tests.distributed.starts', STARTS, 4),
        env=environment(ROOT / 'standins' / 'fakecard'),
        timeout=None,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict(jobs=STARTS, bad=[])


@pytest.mark.parametrize(('failing', 'late'), [(False, False), (True, False), (False, True)])
@in_ranks(2)
def test_groups_end_before_the_watch_unless_a_rank_failed(failing, late):
    """Collectives of a rank that failed may never complete: nothing waits for them."""
    init_device('pytorch', 'cpu', timeout=60)
    torch_dist.barrier()
    watch = failure.current_watch()
    if failing:
        watch.end()
    if late:  # as Python 3.12.0 and 3.12.1 do when they end

        def start(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        threading.Thread.start = start
    process_group._end_groups()
    assert torch_dist.is_initialized() == failing
    names = [thread.name for thread in threading.enumerate()]
    assert 'mmdevplug-beat' in names  # it still shows the others that this rank is alive
    watch.stop()
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith('mmdevplug') for name in names)


def test_the_message_of_the_second_host_counts_ranks_over_all_hosts(tmp_path):
    """Ranks 4 to 7 are on it: rank 5 has ended first, because of rank 7."""
    notes = {1: dict(message='lost rank 7', because_of_another=True)}
    notes[3] = dict(message='the disk is full', because_of_another=False)
    for local, note in notes.items():
        path = tmp_path / 'job' / 'attempt_0' / str(local) / 'error.json'
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(note))
    ended = ProcessFailure(local_rank=1, pid=10, exitcode=1, error_file='<N/A>')
    status, text = describe_end(ChildFailedError('train', {5: ended}), str(tmp_path))
    assert (status, text) == (1, 'rank 7 failed: the disk is full')
