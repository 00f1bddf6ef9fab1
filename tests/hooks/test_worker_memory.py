"""Memory of loader workers: theirs alone, of every loader, and of no other process."""

import multiprocessing
import subprocess
import sys
import time

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from mmdevplug.utils.worker_memory import WorkerMemory
from tests.ranks import run_ranks

MB = 2**20
ITEMS, SIZE = 20, 4_000_000
CONTEXTS = ['fork', 'spawn', 'forkserver']


class Keeps(Dataset):
    """Keeps what it has loaded, or only reads or writes what it had from the beginning."""

    def __init__(self, what='new'):
        self.what, self.kept = what, []
        if what != 'new':
            self.kept = [bytearray(b'x' * SIZE) for _ in range(ITEMS)]

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        if self.what == 'new':
            self.kept.append(bytearray(b'y' * SIZE))
        elif self.what == 'written':
            self.kept[index][:] = b'y' * SIZE
        return len(self.kept[index % len(self.kept)])


def loader(context, **options):
    found = DataLoader(
        Keeps(**options), num_workers=2, multiprocessing_context=context, persistent_workers=True
    )
    list(found)
    return found


def megabytes(memory=None):
    """What a new observer sees first, or an older one now."""
    total, count = (memory or WorkerMemory()).measure()
    return total / MB, count


def hold_until(ready):
    kept = bytearray(b'z' * 100 * MB)
    ready.set()
    time.sleep(60)
    return kept


def measure(context):
    memory = WorkerMemory()
    found = dict(nothing=megabytes(memory))
    first = loader(context)
    found['one pass'] = megabytes(memory)
    children = [psutil.Process(each.pid) for each in multiprocessing.active_children()]
    found['their own'] = sum(each.memory_full_info().uss for each in children) / MB, len(children)
    list(first)
    found['two passes'] = megabytes(memory)
    second = loader(context)
    found['two loaders'] = megabytes(memory)
    ready = multiprocessing.Event()
    others = [multiprocessing.Process(target=hold_until, args=(ready,), daemon=True)]
    others[0].start()
    ready.wait(60)
    code = 'x = bytearray(100 << 20); print(flush=True); input()'
    with subprocess.Popen(
        [sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        program.stdout.readline()
        found['other children'] = megabytes(memory)
        program.kill()
    others[0].kill()
    first._iterator._shutdown_workers()
    found['one left'] = megabytes(memory)
    del first, second
    found['none left'] = megabytes(memory)
    return found


def measure_all():
    found = {context: measure(context) for context in CONTEXTS}
    found['inherited'] = measure_inherited()
    found['in a fork'] = measure_in_a_fork()
    return dict(found, often=read_often())


@pytest.fixture(scope='module')
def measured():
    (found,) = run_ranks(measure_all, 0)
    return found


@pytest.mark.parametrize('context', CONTEXTS)
def test_the_workers_of_every_loader_count_and_no_other_process(measured, context):
    found = measured[context]
    held = ITEMS * SIZE / MB
    counts = {name: count for name, (_, count) in found.items()}
    assert counts == {
        'nothing': 0,
        'one pass': 2,
        'their own': 2,
        'two passes': 2,
        'two loaders': 4,
        'other children': 4,
        'one left': 2,
        'none left': 0,
    }
    of = {name: size for name, (size, _) in found.items()}
    assert of['nothing'] == of['none left'] == 0
    # Started anew, a process has PyTorch in its memory besides.
    assert held <= of['one pass'] < held + (60 if context == 'fork' else 1000)
    assert abs(of['one pass'] - of['their own']) < 25
    assert held - 5 < of['two passes'] - of['one pass'] < held + 25
    assert of['two passes'] + held <= of['two loaders']
    assert abs(of['other children'] - of['two loaders']) < 25


def measure_inherited():
    found = {}
    for what in ('read', 'written'):
        shared = loader('fork', what=what)
        found[what] = megabytes()
        resident = [psutil.Process(w.pid).memory_info().rss for w in shared._iterator._workers]
        found[f'{what}, resident'] = sum(resident) / MB
        del shared
    return found


def test_inherited_memory_counts_once_it_is_written_to(measured):
    found = measured['inherited']
    held = ITEMS * SIZE / MB
    assert found['read'][0] < 60
    assert held <= found['written'][0] < held + 60
    assert found['read, resident'] > 2 * held + found['read'][0]


def measure_in_a_fork():
    memory, kept = WorkerMemory(), loader('fork')
    context = multiprocessing.get_context('fork')
    answer = context.SimpleQueue()
    child = context.Process(target=lambda: answer.put(memory.measure()))
    child.start()
    child.join()
    found = memory.measure()[1], answer.get()
    del kept
    return found


def test_a_process_does_not_count_the_workers_of_the_one_it_was_forked_from(measured):
    assert measured['in a fork'] == (2, (0, 0))


def read_often():
    memory = WorkerMemory()
    kept = loader('fork')
    read = []
    whole = psutil.Process.memory_full_info
    psutil.Process.memory_full_info = lambda process: read.append(process.pid) or whole(process)
    for _ in range(50):
        memory.measure()
    first = len(read)
    memory._began -= 1e6  # a long training
    memory.measure()
    memory.measure()
    return first, read, [worker.pid for worker in kept._iterator._workers]


def test_exact_figures_are_read_of_one_worker_after_the_other_and_seldom(measured):
    first, read, workers = measured['often']
    assert first < 5
    assert set(read) == set(workers)
    assert len(read) == first + 2
