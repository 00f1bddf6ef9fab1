"""Links that are cut and hosts that vanish: no hang, and a message that names rank and host."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import distributed as torch_dist

from benchmarks.hosts import INTERFACE, PORT, Hosts, launch_variables
from mmdevplug import init_device
from mmdevplug.checkpoint.reading import read_checkpoint
from mmdevplug.distributed.waiting import wait_for_everyone
from mmdevplug.fault_tolerance import failure_watch, heartbeat
from mmdevplug.fault_tolerance.failure import current_watch, enter_phase, fail_together
from tests.checkpoint.training import train
from tests.commands import wait_until
from tests.jobs import PATHS
from tests.on_hosts import need_hosts
from tests.ranks import run_ranks

pytestmark = pytest.mark.long

STEPS = 150
PATIENCE = 6.0
#: How long a collective that notices nothing may go on after that.
STOP_SECONDS = 3.0
#: Two beats, a second look, the end of the process, and a busy machine.
ENOUGH = 90


def note(step):
    """Report to the test how far this rank is, and whether it has seen the other one train."""
    seen = current_watch().heartbeat.seen.values()
    with open(os.environ['NOTE'], 'w') as file:
        file.write(json.dumps([step, any('iteration' in one.phase for one in list(seen))]))


def be_quick():
    """Give up other ranks and the store sooner than after a minute."""
    failure_watch.STOP_SECONDS = STOP_SECONDS
    heartbeat.LOST_SECONDS = failure_watch.LOST_SECONDS = PATIENCE


def work():
    """A rank: average again and again, and note how far it is."""

    torch.set_num_threads(1)
    be_quick()
    init_device('pytorch', 'cpu', timeout=300)
    with fail_together('training'):
        for step in range(STEPS):
            enter_phase(f'train: iteration {step + 1}')
            value = torch.ones(1)
            torch_dist.all_reduce(value)
            assert value == torch_dist.get_world_size()
            note(step + 1)
            time.sleep(0.1)
        wait_for_everyone('end of training')


@HOOKS.register_module(force=True)
class Slowly(Hook):
    """Notes each iteration, where it is asked to, and takes a moment."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if 'NOTE' in os.environ:
            note(runner.iter + 1)
            time.sleep(0.1)


def train_slowly(work_dir, resume=False):
    be_quick()
    train(
        work_dir,
        by_epoch=False,
        length=STEPS,
        checkpoint=dict(interval=10, by_epoch=False),
        env_cfg__dist_cfg__timeout=300,
        custom_hooks=[dict(type='EMAHook', momentum=0.1), dict(type='Slowly')],
        resume=resume,
    )


@pytest.fixture(scope='module', autouse=True)
def _possible():
    need_hosts()


class Job:
    """One rank on each of two hosts, in the middle of training."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.ranks = hosts, folder, []

    def start(self, call='work()'):
        script = f'from tests.fault_tolerance.test_network_faults import *; {call}'
        command, self.ranks = [sys.executable, '-c', script], []
        for host in range(self.hosts.count):
            environ = dict(os.environ, **launch_variables(host, 0, 1, self.hosts, PORT))
            path = self.folder / f'note{host}'
            path.unlink(missing_ok=True)
            environ.update(PYTHONPATH=PATHS, NOTE=str(path))
            with open(self.folder / f'out{host}', 'w') as output:
                line = self.hosts.command(host, command)
                self.ranks.append(
                    subprocess.Popen(line, env=environ, stdout=output, stderr=output)
                )
        hosts = range(self.hosts.count)
        wait_until(lambda: all(map(self.in_the_middle, hosts)), 120, lambda: self.output(0))

    def noted(self, host):
        path = self.folder / f'note{host}'
        text = path.read_text() if path.exists() else ''
        return json.loads(text) if text else [0, False]

    def step(self, host):
        return self.noted(host)[0]

    def in_the_middle(self, host):
        step, sees_the_other = self.noted(host)
        return step >= 5 and sees_the_other

    def output(self, host):
        return (self.folder / f'out{host}').read_text()

    def link(self, host, state):
        subprocess.check_call(
            ['ip', '-n', self.hosts._switch, 'link', 'set', f'port{host}', state]
        )

    def statuses(self):
        deadline = time.monotonic() + ENOUGH
        return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in self.ranks]


@contextlib.contextmanager
def job(folder, *call):
    with Hosts(2) as hosts:
        running = Job(hosts, folder)
        try:
            running.start(*call)
            yield running
        finally:
            for rank in running.ranks:
                rank.kill()
                rank.wait()


def check_blamed(output, rank):
    lines = [line for line in output.splitlines() if 'RankFailedError' in line]
    assert len(lines) == 1, output
    assert f'because of rank {rank} of 2 on host' in lines[0]
    assert "in 'train: iteration" in lines[0]
    assert 'Traceback' not in output


def test_a_link_that_comes_back_soon(tmp_path):
    with job(tmp_path) as running:
        running.link(1, 'down')
        time.sleep(2)
        running.link(1, 'up')
        assert running.statuses() == [0, 0], running.output(0) + running.output(1)
        assert [running.step(host) for host in range(2)] == [STEPS, STEPS]


def test_a_link_that_is_cut_for_good(tmp_path):
    with job(tmp_path) as running:
        running.link(1, 'down')
        assert running.statuses() == [1, 1]
        check_blamed(running.output(0), 1)
        assert 'no sign of life' in running.output(0)
        # That host cannot reach the store, and says so.
        check_blamed(running.output(1), 0)
        assert f'10.0.0.1:{PORT}' in running.output(1)
        assert max(running.step(host) for host in range(2)) < STEPS


def test_training_goes_on_when_the_link_is_back(tmp_path):
    cut, whole = tmp_path / 'cut', tmp_path / 'whole'
    with job(tmp_path, f'train_slowly({str(cut)!r})') as running:
        running.link(1, 'down')
        assert running.statuses() == [1, 1]
        assert max(running.step(host) for host in range(2)) < STEPS
        running.link(1, 'up')
        running.start(f'train_slowly({str(cut)!r}, resume=True)')
        assert running.statuses() == [0, 0], running.output(0) + running.output(1)
    run_ranks(train_slowly, 2, str(whole))
    got, expected = (read_checkpoint(str(run / f'iter_{STEPS}.pth')) for run in (cut, whole))
    for key in ('state_dict', 'ema_state_dict'):
        for name, value in expected[key].items():
            assert torch.equal(got[key][name], value), (key, name)


@pytest.mark.parametrize('gone', [0, 1])
def test_a_host_that_vanishes(tmp_path, gone):
    with job(tmp_path) as running:
        # First the link: a process that is killed would say goodbye by it.
        running.link(gone, 'down')
        running.ranks[gone].kill()
        statuses = running.statuses()
        assert statuses[gone] == -9
        assert statuses[1 - gone] == 1
        check_blamed(running.output(1 - gone), gone)


def test_the_process_that_holds_the_store_is_killed(tmp_path):
    with job(tmp_path) as running:
        running.ranks[0].kill()
        assert running.statuses() == [-9, 1]
        check_blamed(running.output(1), 0)


def drop_by_firewall(hosts, host):
    """Throw away what a host receives and sends, by rules of its firewall."""
    if shutil.which('iptables') is None:
        pytest.skip('no iptables on PATH')
    for chain in ('INPUT', 'OUTPUT'):
        drop = ['iptables', '-A', chain, '-p', 'tcp', '-j', 'DROP']
        done = subprocess.run(hosts.command(host, drop), capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f'iptables does not work in a namespace here: {done.stderr.strip()}')


def misdirect(hosts, host):
    """Send what is for a host to a network card that is nowhere; the link stays up."""
    for other in set(range(hosts.count)) - {host}:
        address = hosts.address_of(host)
        line = ['ip', 'neigh', 'replace', address, 'dev', INTERFACE, 'nud', 'permanent']
        subprocess.check_call(hosts.command(other, [*line, 'lladdr', '02:00:00:00:00:00']))


@pytest.mark.parametrize('drop', [drop_by_firewall, misdirect])
def test_packets_that_are_dropped(tmp_path, drop):
    with job(tmp_path) as running:
        drop(running.hosts, 1)
        assert running.statuses() == [1, 1]
        check_blamed(running.output(0), 1)
        check_blamed(running.output(1), 0)
