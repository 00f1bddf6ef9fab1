"""Ranks are forked from one process, and find what they would find in a process of their own."""

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from mmdevplug.cli.rank_server import RankServer
from mmdevplug.errors import LaunchError
from tests.jobs import PATHS, ROOT, torch_before
from tests.ranks import free_port

from .starting import DIGITS, MAIN

pytestmark = pytest.mark.skipif(
    torch_before('2.0.0'), reason='builds for CUDA can be forked from PyTorch 2 on'
)

# What MMEngine imports where a vendor's card may be.
STARTS_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
FACTS = """
import json, multiprocessing, os, pathlib, random, signal, sys, threading
from mmdevplug.cli.common import run

def main(argv):
    import numpy, psutil, torch
    print('to standard output', flush=True)
    own = psutil.Process()
    facts = dict(
        argv=sys.argv, cmdline=own.cmdline(), cwd=os.getcwd(), path=sys.path,
        main=sys.modules['__main__'].__file__, name=main.__module__,
        variables=sorted(os.environ), omp=os.environ['OMP_NUM_THREADS'],
        threads=torch.get_num_threads(), alive=threading.active_count(),
        leads=os.getsid(0) == os.getpid(), parent='launch' in ' '.join(own.parent().cmdline()),
        method=multiprocessing.get_start_method(), process=multiprocessing.current_process().name,
        stdin=os.fstat(0).st_ino, files=len(os.listdir('/proc/self/fd')),
        handlers=[str(signal.getsignal(n)) for n in (2, 15, 1, 10)],
        blocked=[str(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        nice=os.getpriority(os.PRIO_PROCESS, 0),
    )
    numbers = [random.random(), numpy.random.rand(), torch.rand(1).item()]
    folder = pathlib.Path(os.environ['FACTS'])
    (folder / os.environ['RANK']).write_text(json.dumps([facts, numbers]))

if __name__ == '__main__':
    sys.exit(run(main))
"""


@pytest.fixture
def threads(tmp_path):
    """A folder with a package that starts a thread when it is imported."""
    folder = tmp_path / 'vendor'
    folder.mkdir()
    (folder / 'torch_npu.py').write_text(STARTS_THREAD)
    return folder


def run(command, *folders, **environ):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([*map(str, folders), PATHS]), **environ)
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )


def facts_of(folder, *folders):
    """What two ranks find; and what the command printed."""
    folder.mkdir()
    script = folder.parent / 'facts.py'
    script.write_text(FACTS)
    words = ['-m', 'mmdevplug.cli.launch', '--script', script, '2', DIGITS, '--oversubscribe']
    done = run([sys.executable, *words], *folders, FACTS=str(folder), PORT=str(free_port()))
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall('to standard output|.', done.stdout)) == ['to standard output'] * 2
    ranks = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
    return [facts for facts, _ in ranks], [numbers for _, numbers in ranks], done.stderr


def test_forked_ranks_find_what_started_ones_do(tmp_path, threads):
    forked, numbers, printed = facts_of(tmp_path / 'forked')
    assert 'not forked' not in printed
    started, _, printed = facts_of(tmp_path / 'started', threads)
    line = (
        'mmdevplug: ranks are not forked from one process, because an imported package has '
        'started 1 thread(s), python: the start takes longer.'
    )
    assert printed.splitlines().count(line) == 1
    for one in started:
        one['path'].remove(str(threads))
    for one, other in zip(forked, started):
        for name, value in one.items():
            assert value == other[name], name
    assert all(one != other for one, other in zip(*numbers))


KILLS_SERVER = """
import os, psutil, signal
if os.environ.get('RANK') == '0':
    for one in psutil.Process(os.getppid()).children():
        if 'MMDEVPLUG_RANK_SERVER' in one.environ():
            one.kill()
    os._exit(3)
"""


def test_a_server_that_dies_between_two_forks_ends_the_job(tmp_path):
    (tmp_path / 'kills_server.py').write_text(KILLS_SERVER)
    config = tmp_path / 'config.py'
    config.write_text(
        f'_base_ = [{DIGITS!r}]\n'
        "custom_imports = dict(imports=['mmdevplug', 'mmdevplug.examples.digits', "
        "'kills_server'])\n"
    )
    command = [*MAIN, 'train', config, '--nproc', '2', '--max-restarts', '1', '--oversubscribe']
    done = run([*command, '--work-dir', tmp_path / 'work'], tmp_path)
    assert done.returncode == 1, done.stderr
    assert 'from which ranks are forked has ended with status -9' in done.stderr.splitlines()[-1]
    assert 'Traceback' not in done.stderr


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv('PYTHONPATH', PATHS)
    monkeypatch.setenv('OMP_NUM_THREADS', '1')  # a rank with other threads is not forked
    script = tmp_path / 'waits.py'
    script.write_text(
        'import sys, time\nfrom mmdevplug.cli.common import run\n'
        'sys.exit(run(lambda argv: time.sleep(100)))\n'
    )
    with RankServer([sys.executable, '-u', str(script)]) as server:
        assert server.check(['--origin=--nproc', '1', DIGITS]).wait() == 0
        yield server


def test_signals_reach_a_rank_from_its_first_moment(server):
    environ = dict(os.environ)
    assert server.can_fork(server._command, environ)
    for number in (signal.SIGKILL, signal.SIGTERM):
        rank = server.fork(environ, {})
        assert psutil.Process(rank.pid).ppid() == os.getpid()
        os.killpg(rank.pid, number)
        assert rank.wait(60) == -number
    with pytest.raises(subprocess.TimeoutExpired):
        server.fork(environ, {}).wait(0.1)
    psutil.Process(server.pid).kill()
    with pytest.raises(LaunchError, match='has ended with status -9'):
        server.fork(environ, {})


def test_a_rank_with_other_threads_is_not_forked(server):
    assert not server.can_fork(server._command, dict(os.environ, OMP_NUM_THREADS='3'))
    assert not server.can_fork([*server._command, '--other'], os.environ)
