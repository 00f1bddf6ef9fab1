"""Hosts join and leave a job: network namespaces in the place of hosts, real everything else."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
from mmengine.config import Config

from benchmarks.hosts import INTERFACE, Hosts, available
from mmdevplug.checkpoint.reading import read_checkpoint
from tests.cli.elastic_job import SAMPLES, STEP, whole_config
from tests.jobs import PATHS, ROOT

pytestmark = pytest.mark.long

MAIN = [sys.executable, '-m', 'mmdevplug.cli.main']
EPOCHS = 9  # of 8 iterations on two ranks, or 16 on one


class Job:
    """A job whose hosts are network namespaces.

    Host 0 keeps the rendezvous, unless another does, and has no ranks.
    """

    def __init__(self, folder, hosts, keeper=0):
        self.folder, self.hosts, self.keeper = folder, hosts, keeper
        self.samples = folder / 'samples'
        self.samples.mkdir()
        self.config = folder / 'job.py'
        self.running = {}

    def write_config(self, pause=0.25, **accelerator):
        cfg = whole_config(
            self.folder / 'work',
            length=EPOCHS,
            checkpoint=dict(interval=3, by_epoch=False),
            default_hooks__logger=dict(type='LoggerHook', interval=1),
            custom_hooks=[dict(type='WriteSamples', folder=str(self.samples), pause=pause)],
            log_level='INFO',
        )
        cfg['accelerator'].update(**accelerator)
        cfg['custom_imports'] = dict(imports=['mmdevplug', 'tests.cli.elastic_job'])
        del cfg['launcher']
        Config(cfg).dump(str(self.config))

    def start(self, host, *words):
        env = {name: value for name, value in os.environ.items() if not name.startswith('SLURM')}
        env.update(PYTHONPATH=PATHS, OMP_NUM_THREADS='1', GLOO_SOCKET_IFNAME=INTERFACE)
        with open(str(self.folder / f'host{host}'), 'a') as printed:
            self.running[host] = subprocess.Popen(
                self.hosts.command(host, [*MAIN, *words]), cwd=str(ROOT), env=env,
                stdout=printed, stderr=printed, start_new_session=True,
            )  # fmt: skip

    def train(self, host, nnodes='1:2', *words):
        address = self.hosts.address_of(self.keeper)
        self.start(
            host, 'train', str(self.config), '--nnodes', nnodes, '--nproc', '1',
            '--master-addr', address, '--work-dir', str(self.folder / 'work'), *words,
        )  # fmt: skip

    def train_on_two_hosts(self):
        """Train on hosts 1 and 2, which meet at host 0, until both have iterations behind them."""
        self.write_config()
        self.start(0, 'rendezvous')
        self.train(1)
        self.train(2)
        self.wait_for_iterations(ranks=2)

    def lose(self, host):
        """Cut a host off and end everything on it, without a word to the others."""
        subprocess.run(
            ['ip', '-n', self.hosts.names[host], 'link', 'set', INTERFACE, 'down'], check=True
        )
        self.kill(host)

    def kill(self, host):
        process = self.running.pop(host)
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(process.pid)
            for one in [*agent.children(recursive=True), agent]:
                one.kill()
        process.wait()

    def repair(self, host):
        subprocess.run(
            ['ip', '-n', self.hosts.names[host], 'link', 'set', INTERFACE, 'up'], check=True
        )

    def printed(self, host):
        return (self.folder / f'host{host}').read_text()

    def lines(self):
        """What the ranks wrote: time, number of ranks, iteration, samples."""
        found = []
        for path in self.samples.iterdir():
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith('\n'):
                    found.append(SimpleNamespace(**dict(zip(NAMES, json.loads(line)))))
        return sorted(found, key=lambda line: line.time)

    def wait_for(self, reached, seconds=240):
        deadline = time.monotonic() + seconds
        while not reached():
            for host in [host for host, one in self.running.items() if one.poll() is not None]:
                raise AssertionError(f'host {host} ended:\n{self.printed(host)[-3000:]}')
            assert time.monotonic() < deadline, [self.printed(host)[-3000:] for host in (1, 2)]
            time.sleep(0.2)

    def wait_for_iterations(self, ranks, count=4):
        """Wait for this number of further iterations on this number of ranks."""
        begun = time.time()
        self.wait_for(
            lambda: (
                sum(line.ranks == ranks and line.time > begun for line in self.lines())
                >= count * ranks
            )
        )

    def first_host(self):
        """The host with rank 0 in the newest round."""
        rounds = {
            host: re.findall(r'round (\d+): this is host (\d+) of (\d+)', self.printed(host))[-1]
            for host in self.running
            if host != self.keeper
        }
        return next(host for host, (_, rank, _) in rounds.items() if rank == '0')

    def check_result(self):
        """Whether all epochs were trained, on all samples, of which each rank takes as many."""
        state = read_checkpoint((self.folder / 'work' / 'last_checkpoint').read_text())
        assert state['meta']['epoch'] == EPOCHS
        lines = self.lines()
        assert {len(line.samples) for line in lines} == {STEP}
        assert len({one for line in lines for one in line.samples}) == SAMPLES


NAMES = ('time', 'ranks', 'iteration', 'samples')


@pytest.fixture
def job(tmp_path):
    found = available()
    if not found.possible:
        pytest.skip(found.reason)
    with Hosts(3) as hosts:
        made = Job(tmp_path, hosts)
        try:
            yield made
        finally:
            for host in list(made.running):
                made.kill(host)


def test_two_hosts_one_host_and_two_again(job):
    """The host with rank 0 is lost, and joins again; the other goes on meanwhile."""
    job.train_on_two_hosts()
    lost = job.first_host()
    left = 3 - lost
    job.lose(lost)
    job.wait_for_iterations(ranks=1)
    job.repair(lost)
    job.train(lost)
    job.wait_for_iterations(ranks=2)
    agents = [job.running.pop(host) for host in (1, 2)]
    assert [agent.wait(timeout=120) for agent in agents] == [0, 0], job.printed(left)
    told = job.printed(left)
    # The loss of a host is no failure of this one, of which three are allowed.
    assert re.findall(r'round \d+: this is host \d of (\d)(, \d before)?; (\d) of 3', told) == [
        ('2', '', '3'),
        ('1', ', 2 before', '3'),
        ('2', ', 1 before', '3'),
    ]
    job.check_result()


def test_a_host_that_is_asked_to_end_leaves_at_once(job):
    """The scheduler takes a host away: the other one goes on with the next iteration."""
    job.train_on_two_hosts()
    leaving = job.running.pop(1)
    psutil.Process(leaving.pid).terminate()
    assert leaving.wait(timeout=60) == 143, job.printed(1)
    job.wait_for_iterations(ranks=1)
    assert job.running.pop(2).wait(timeout=120) == 0, job.printed(2)
    told = job.printed(2)
    rounds = re.findall(r'round \d+: this is host \d of (\d)(?:, \d before)?; (\d) of 3', told)
    assert rounds == [('2', '3'), ('1', '3')]
    iterations = [line.iteration for line in job.lines() if line.ranks == 1]
    assert min(iterations) == 1 + max(line.iteration for line in job.lines() if line.ranks == 2)
    job.check_result()


def test_the_host_that_keeps_the_rendezvous_is_lost(job):
    """The other one ends, and says what to do; the job goes on where it was."""
    job.keeper = 1
    job.write_config()
    job.train(1)
    job.train(2)
    job.wait_for_iterations(ranks=2)
    job.lose(1)
    other = job.running.pop(2)
    assert other.wait(timeout=200) == 1
    told = job.printed(2)
    (line,) = re.findall(r'mmdevplug: LaunchError: .*', told)
    assert f'cannot meet the others at {job.hosts.address_of(1)}:29500' in line
    assert '--resume; `mmdevplug rendezvous` on a host that stays' in line
    assert 'Traceback' not in told
    job.keeper = 2
    job.train(2, '1:2', '--resume')
    job.wait_for_iterations(ranks=1)
    assert job.running.pop(2).wait(timeout=120) == 0
    job.check_result()


def test_a_host_that_comes_too_late_is_told_so(job):
    job.write_config(pause=0.0)
    job.start(0, 'rendezvous')
    job.train(1, '1:2')
    assert job.running.pop(1).wait(timeout=150) == 0, job.printed(1)
    job.train(2, '1:2')
    assert job.running.pop(2).wait(timeout=100) == 1, job.printed(2)
    (line,) = re.findall(r'mmdevplug: LaunchError: .*', job.printed(2))
    assert 'has ended, and takes no more hosts' in line
