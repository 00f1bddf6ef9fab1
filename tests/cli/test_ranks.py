"""Ranks are forked from one process; the first line after a failure names rank, what and where."""

import json
import re

import pytest

from tests.cli.running import config
from tests.commands import CLI, environment, run

# In place of a vendor's package, which MMEngine imports where it is installed.
VENDOR = 'raise ImportError'
FACTS = """
import json, multiprocessing, os, pathlib, random, signal, sys, threading
import numpy, torch
facts = dict(
    cwd=os.getcwd(), threads=torch.get_num_threads(),
    alive=threading.active_count(),
    method=multiprocessing.get_start_method(),
    handlers=[str(signal.getsignal(n)) for n in (2, 15, 1, 10)],
    blocked=[str(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
)
numbers = [random.random(), numpy.random.rand(), torch.rand(1).item()]
pathlib.Path(os.environ['FACTS'], os.environ['RANK']).write_text(json.dumps([facts, numbers]))
"""
FAILS = """
import os, signal, sys
if os.environ['RANK'] == '1':
    {what}
"""


def train(folder, module, code, *words, **environ):
    """Train in two ranks, each of which runs this code as a module."""
    (folder / f'{module}.py').write_text(code)
    path = config(folder, 'train_cfg = dict(max_epochs=1, val_interval=9)', [module])
    command = [*CLI, 'train', path, '--nproc', '2', '--work-dir', folder / 'work', *words]
    return run(*command, env=environment(folder, **environ))


def test_forked_ranks_find_what_started_ones_do(tmp_path):
    found = {}
    for kind in ('forked', 'started'):
        folder = tmp_path / kind
        folder.mkdir()
        if kind == 'started':
            (folder / 'torch_npu.py').write_text(VENDOR)
        done = train(folder, 'facts', FACTS, FACTS=str(folder))
        assert done.returncode == 0, done.stderr
        found[kind] = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
        line = 'mmdevplug: ranks are not forked from one process, because PyTorch or MMEngine'
        assert done.stderr.count(line) == (kind == 'started')
        assert len(re.findall('Warning:', done.stderr)) <= 1
    for (one, _), (other, _) in zip(found['forked'], found['started']):
        for name, value in one.items():
            assert value == other[name], name
    assert all(one != other for one, other in zip(*(numbers for _, numbers in found['forked'])))


@pytest.mark.parametrize(
    ('what', 'told'),
    [
        (
            "raise ValueError('no such image')",
            r'rank 1 .*failed: .*fails.py:4: ValueError: no such image',
        ),
        ('sys.exit(3)', r'rank 1 \(pid \d+\) ended with exit status 3'),
        ('os.kill(os.getpid(), signal.SIGSEGV)', r'rank 1 \(pid \d+\) was ended by SIGSEGV'),
    ],
)
def test_a_failure_is_told_in_one_line(tmp_path, what, told):
    done = train(tmp_path, 'fails', FAILS.format(what=what))
    assert done.returncode == 1
    assert re.match(f'mmdevplug: {told}', done.stderr.splitlines()[-1]), done.stderr
    assert 'Traceback' not in done.stderr
    # After a signal PyTorch prints where it came.
    assert ('torch/distributed' in done.stderr) == ('SIGSEGV' in what)


def test_one_rank_alone_prints_no_warnings(tmp_path):
    done = train(tmp_path, 'quiet', '', '--nproc', '1')
    assert done.returncode == 0, done.stderr
    assert 'OMP' not in done.stderr + done.stdout
    assert 'Warning' not in done.stderr
