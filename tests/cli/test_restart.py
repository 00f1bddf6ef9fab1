"""Failed workers are started again and go on where they were: on one host and on two."""

import ipaddress
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.hosts import INTERFACE
from tests.cli.running import config
from tests.commands import CLI, environment, run
from tests.ranks import free_port

pytestmark = pytest.mark.long

TRAIN = [*CLI, 'train']


def write_config(folder, hooks):
    """Three epochs of few iterations, a checkpoint after each, and hooks that make trouble."""
    lines = (
        f'custom_hooks = {hooks!r}\n'
        'train_cfg = dict(max_epochs=3, val_interval=9)\n'
        'train_dataloader = dict(batch_size=100)\n'
        'default_hooks = dict(checkpoint=dict(interval=1), logger=dict(interval=1))\n'
    )
    return str(config(folder, lines, ['tests.launch_hooks']))


def epochs_of(work_dir):
    """Which epochs the job logged, by start of the job, in order."""
    starts = []
    for folder in sorted(path for path in Path(work_dir).iterdir() if path.is_dir()):
        (log,) = folder.glob('*.log')
        numbers = re.findall(r'Epoch\(train\)[^[]*\[(\d+)\]', log.read_text())
        starts.append(sorted(set(map(int, numbers))))
    return starts


@pytest.fixture(scope='module')
def restarted(tmp_path_factory):
    """Three ranks on one host; the second is killed in its second epoch."""
    folder = tmp_path_factory.mktemp('restarted')
    hooks = [
        dict(type='NoteListeners', path=str(folder / 'sockets.json'), iteration=2),
        # Four iterations in an epoch of three ranks.
        dict(type='KillOnce', rank=1, iteration=6),
    ]
    command = [*TRAIN, write_config(folder, hooks), '--nproc', '3', '--max-restarts', '1']
    done = run(*command, '--work-dir', folder / 'work')
    return folder, done


def test_a_killed_rank_is_restarted_and_the_job_goes_on(restarted):
    folder, done = restarted
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert printed.count('This is restart 1 of this job') == 1
    assert epochs_of(folder / 'work') == [[1, 2], [2, 3]]


def test_a_job_on_one_host_listens_on_loopback_alone(restarted):
    found = json.loads((restarted[0] / 'sockets.json').read_text())
    assert len({pid for pid, _, _ in found['sockets']}) >= 3  # gloo of each rank
    assert found['command'] in [pid for pid, _, _ in found['sockets']]  # PyTorch's store
    open_to_others = [
        address
        for _, address, _ in found['sockets']
        if not ipaddress.ip_address(address).is_loopback
    ]
    assert open_to_others == []


def test_a_job_whose_restarts_are_used_up_names_the_rank_in_one_line(tmp_path):
    hooks = [dict(type='KillOnce', rank=0, iteration=1)]
    env = environment(PORT=str(free_port()), NODE_RANK='3', MASTER_ADDR='10.9.9.9')
    command = ['bash', 'tools/dist_train.sh', write_config(tmp_path, hooks), '1']
    done = run(*command, '--work-dir', tmp_path / 'work', env=env)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith('mmdevplug: rank 0')]
    assert 'was ended by SIGKILL' in line
    assert 'Traceback' not in done.stderr


def test_a_killed_rank_on_one_of_two_hosts_is_restarted(tmp_path, hosts):
    """The first host starts with the script, the second with the command."""
    path = write_config(tmp_path, [dict(type='KillOnce', rank=2, iteration=5)])
    common = ['--work-dir', str(tmp_path / 'work')]
    flags = [
        *('--nproc', '2', '--nnodes', '2', '--node-rank', '1'),
        *('--master-addr', hosts.address, '--max-restarts', '1'),
    ]
    script = environment(
        NNODES='2', NODE_RANK='0', MASTER_ADDR=hosts.address, MAX_RESTARTS='1',
        GLOO_SOCKET_IFNAME=INTERFACE,
    )  # fmt: skip
    commands = [
        (['bash', 'tools/dist_train.sh', path, '2', *common], script),
        ([*TRAIN, path, *flags, *common], environment(GLOO_SOCKET_IFNAME=INTERFACE)),
    ]

    def start(host):
        command, env = commands[host]
        return run(*hosts.command(host, command), env=env)

    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(start, range(2)))
    assert [job.returncode for job in jobs] == [0, 0], [job.stderr for job in jobs]
    starts = epochs_of(tmp_path / 'work')
    assert [min(start) for start in starts] == [1, starts[0][-1]]
    assert starts[-1][-1] == 3
