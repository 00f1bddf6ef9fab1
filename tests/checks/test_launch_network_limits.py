"""The shell, the network and the limits of the host, in real circumstances."""

import json
import os
import socket
import subprocess
import sys

import psutil
import pytest
import torch

from mmdevplug.checks import launch, limits, network

from .running import environment, python, the

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='namespaces need root')

LEFT_OVER = dict(
    RANK='5',
    WORLD_SIZE='2',
    LOCAL_RANK='5',
    MASTER_ADDR='node7',
    MASTER_PORT='29501',
    TORCHELASTIC_RUN_ID='old',
)


# launch -----------------------------------------------------------------------------------------


def test_nothing_set_is_ok():
    assert [f.level for f in launch.examine({'HOME': '/root'})] == ['ok']


def test_what_an_old_job_left_is_named_with_the_line_that_removes_it():
    found = the(
        launch.examine({**LEFT_OVER, 'HOME': '/'}), 'warning', 'RANK=5', 'MASTER_ADDR=node7'
    )
    assert found.remedy.startswith('unset ')
    code = 'import os, json; print(json.dumps(dict(os.environ)))'
    script = f'{found.remedy}; {sys.executable} -c "{code}"'
    printed = subprocess.check_output(['bash', '-c', script], env={**os.environ, **LEFT_OVER})
    left = json.loads(printed)
    assert set(left).isdisjoint(LEFT_OVER)
    assert [f.level for f in launch.examine(left) if f.level == 'warning'] == []


def test_contradictions_of_what_is_left_are_named():
    found = the(launch.examine(LEFT_OVER), 'warning')
    assert 'RANK=5 and WORLD_SIZE=2 disagree' in found.found


@pytest.mark.parametrize(
    ('environ', 'named'),
    [
        (dict(SLURM_PROCID='3', SLURM_NTASKS='2', SLURM_LOCALID='0'), 'SLURM_PROCID=3'),
        (dict(SLURM_PROCID='abc', SLURM_NTASKS='2'), "SLURM_PROCID='abc'"),
        (dict(OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_SIZE='2'), 'OMPI_COMM_WORLD_LOCAL_RANK'),
    ],
)
def test_contradictions_of_schedulers_are_errors(environ, named):
    environ = dict(environ, SLURM_NODELIST='localhost', SLURM_NNODES='1')
    found = the(launch.examine(environ), 'error', named)
    assert found.remedy.startswith('unset ')


def test_values_of_other_variables_are_not_told():
    secret = 'hf_' + 'secret' * 3
    environ = {**LEFT_OVER, 'HF_TOKEN': secret, 'TORCHELASTIC_ERROR_FILE': secret}
    assert secret not in json.dumps([f.as_dict() for f in launch.examine(environ)])


# network ----------------------------------------------------------------------------------------


def test_port_that_is_taken_names_who_holds_it_and_a_free_one():
    with socket.socket() as holder:
        holder.bind(('127.0.0.1', 0))
        holder.listen(1)
        port = str(holder.getsockname()[1])
        found = the(network.examine({'MASTER_PORT': port}), 'error', f'MASTER_PORT={port}')
        assert f'process {os.getpid()} ' in found.found
    free = int(found.remedy.replace('export MASTER_PORT=', ''))
    assert the(network.examine({'MASTER_PORT': str(free)}), 'ok', f'port {free} is free')


@pytest.mark.parametrize(
    ('error', 'name'),
    [
        (psutil.NoSuchProcess, 'which has ended'),
        (psutil.AccessDenied, 'whose name the system does not show'),
    ],
)
def test_process_without_a_name_that_holds_a_port(monkeypatch, error, name):
    def refuse(pid):
        raise error(pid)

    with socket.socket() as holder:
        holder.bind(('127.0.0.1', 0))
        holder.listen(1)
        port = str(holder.getsockname()[1])
        monkeypatch.setattr(psutil, 'Process', refuse)
        found = the(network.examine({'MASTER_PORT': port}), 'error', f'MASTER_PORT={port}')
    assert f'by process {os.getpid()} ({name})' in found.found


@pytest.mark.parametrize('port', ['', '0', '70000', 'http'])
def test_port_that_is_none(port):
    assert the(network.examine({'MASTER_PORT': port}), 'error', repr(port)).remedy


def test_interfaces_are_listed_and_missing_ones_are_errors():
    environ = dict(GLOO_SOCKET_IFNAME='lo,nope0', NCCL_SOCKET_IFNAME='^docker')
    findings = list(network.examine(environ))
    assert '127.0.0.1' in the(findings, 'note', 'interfaces:').found
    found = the(findings, 'error', 'GLOO_SOCKET_IFNAME')
    assert 'no interface nope0' in found.found
    assert found.remedy == 'unset GLOO_SOCKET_IFNAME'
    assert the(findings, 'ok', 'NCCL_SOCKET_IFNAME')


NAMES = """
import json
from mmdevplug.checks import network
print(json.dumps([f[:5] for f in network.examine({})]))
"""


@needs_root
def test_host_name_that_nobody_knows():
    name = 'no-such-host-here.invalid'
    prefix = ['unshare', '--uts', 'sh', '-c', f'hostname {name}; exec "$@"', '--']
    found = [one for one in python(NAMES, prefix=prefix) if name in one[2]]
    assert [one[1] for one in found] == ['warning']
    assert 'gloo looks it up' in found[0][3]
    assert found[0][4].startswith('export GLOO_SOCKET_IFNAME=')


def test_sockets_of_this_process_are_told_apart():
    with socket.socket() as inside, socket.socket() as outside:
        inside.bind(('127.0.0.1', 0))
        outside.bind(('0.0.0.0', 0))
        for one in (inside, outside):
            one.listen(1)
        ports = [one.getsockname()[1] for one in (inside, outside)]
        findings = list(network.examine_listening(network.listening_here(4), True))
    assert f'rank 4 at 127.0.0.1:{ports[0]}' in the(findings, 'ok').found
    found = the(findings, 'warning')
    assert f'rank 4 at 0.0.0.0:{ports[1]}' in found.found
    assert f'127.0.0.1:{ports[0]}' not in found.found
    assert f'--dport {ports[1]}' in found.remedy


# limits -----------------------------------------------------------------------------------------

LIMITS = """
import json
from mmdevplug.checks import limits
print(json.dumps([f[:5] for f in limits.examine({ranks})]))
"""


def limit(word, ranks=1, prefix=(), **environ):
    found = python(LIMITS.format(ranks=ranks), prefix=prefix, **environ)
    (one,) = [one for one in found if one[2].startswith(word)]
    return one


@pytest.mark.parametrize(
    ('hard', 'ranks', 'level', 'remedy'),
    [
        ('-Hn 4096', 1, 'warning', 'ulimit -n 1024'),
        ('-Hn 4096', 600, 'error', 'ulimit -n 2464'),
        ('-Hn 256', 600, 'error', 'limits.conf'),
    ],
)
def test_few_open_files(hard, ranks, level, remedy):
    prefix = ['bash', '-c', f'ulimit -Sn 256; ulimit {hard}; exec "$@"', '--']
    found = limit('open files', ranks, prefix)
    assert found[1] == level
    assert 'at most 256' in found[2]
    assert remedy in found[4]


@needs_root
def test_small_shared_memory():
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm; exec "$@"'
    found = limit('shared memory', prefix=['unshare', '--mount', 'sh', '-c', mount, '--'])
    assert found[1] == 'warning'
    assert 'of 64.00 MiB' in found[2]
    assert '--shm-size' in found[4]


def test_memory_of_a_control_group(tmp_path):
    (tmp_path / 'memory.max').write_text(str(3 << 20))
    (tmp_path / 'memory.current').write_text(str(1 << 20))
    left, origin = limits.available_memory(str(tmp_path))
    assert left == 2 << 20
    assert 'memory.max' in origin
    (tmp_path / 'memory.max').write_text('max')
    assert limits.available_memory(str(tmp_path))[1] == 'of the host'


def test_more_processes_than_memory_has_room_for():
    found = the(limits.examine(ranks=10_000), 'error', 'memory: ')
    assert '--nproc' in found.remedy


@pytest.mark.parametrize(
    ('value', 'ranks', 'level'),
    [('4096', 1, 'warning'), ('two', 1, 'warning'), ('1', 1, 'ok'), (None, 4096, 'note')],
)
def test_threads(value, ranks, level):
    environ = {} if value is None else {'OMP_NUM_THREADS': value}
    word = 'OMP_NUM_THREADS' if value == 'two' else 'core(s)'
    found = the(limits.examine(ranks, environ=environ), level, word)
    assert (level == 'ok') == (not found.remedy)


def test_cores_of_a_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(64)), raising=False)
    assert limits.usable_cores(str(tmp_path)) == 64
    for text, cores in (('max 100000', 64), ('150000 100000', 2)):
        (tmp_path / 'cpu.max').write_text(text)
        assert limits.usable_cores(str(tmp_path)) == cores
    (tmp_path / 'cpu.max').unlink()
    (tmp_path / 'cpu').mkdir()
    (tmp_path / 'cpu' / 'cpu.cfs_period_us').write_text('100000\n')
    for text, cores in (('-1\n', 64), ('400000\n', 4)):
        (tmp_path / 'cpu' / 'cpu.cfs_quota_us').write_text(text)
        assert limits.usable_cores(str(tmp_path)) == cores


def test_threads_of_pytorch_where_nothing_is_set(monkeypatch):
    monkeypatch.setattr(limits, 'usable_cores', lambda: 2)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 64)
    found = the(limits.examine(environ={}), 'warning', '2 core(s) for 1 process(es) of 64 thread')
    assert found.remedy == 'export OMP_NUM_THREADS=2'


def test_work_dir_that_takes_no_files(tmp_path):
    (tmp_path / 'file').write_text('')
    found = the(limits.examine(1, str(tmp_path / 'file' / 'work')), 'error', 'takes no files')
    assert '--work-dir' in found.remedy
    before = sorted(tmp_path.iterdir())
    the(limits.examine(1, str(tmp_path / 'new' / 'work')), 'ok', 'disk: ')
    assert sorted(tmp_path.iterdir()) == before


def test_environment_of_children_is_clean():
    assert 'RANK' not in environment()
