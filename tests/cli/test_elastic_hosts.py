"""Hosts join and leave a job: network namespaces in the place of hosts, real everything else."""

import json
import re
import subprocess
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
from mmengine.config import Config

from benchmarks.hosts import INTERFACE
from mmdevplug.checkpoint.reading import read_checkpoint
from tests.cli.elastic_job import SAMPLES, STEP, whole_config
from tests.commands import CLI, environment
from tests.jobs import ROOT

pytestmark = pytest.mark.long


EPOCHS = 9  # of 8 iterations on two ranks, or 16 on one


class Job:
    """A job whose two hosts are network namespaces and meet at one of them."""

    def __init__(self, folder, hosts):
        self.folder, self.hosts, self.keeper, self.running = folder, hosts, 0, {}
        self.samples, self.config = folder / 'samples', folder / 'job.py'
        self.samples.mkdir()
        cfg = whole_config(
            folder / 'work',
            length=EPOCHS,
            checkpoint=dict(interval=3, by_epoch=False),
            default_hooks__logger=dict(type='LoggerHook', interval=1),
            custom_hooks=[dict(type='WriteSamples', folder=str(self.samples), pause=0.25)],
            log_level='INFO',
        )
        cfg['custom_imports'] = dict(imports=['mmdevplug', 'tests.cli.elastic_job'])
        del cfg['launcher']
        Config(cfg).dump(str(self.config))

    def train(self, host):
        words = [
            *('train', str(self.config), '--nnodes', '1:2', '--nproc', '1', '--master-addr'),
            *(self.hosts.address_of(self.keeper), '--work-dir', str(self.folder / 'work')),
        ]
        env = environment(GLOO_SOCKET_IFNAME=INTERFACE)
        with open(str(self.folder / f'host{host}'), 'a') as printed:
            self.running[host] = subprocess.Popen(
                self.hosts.command(host, [*CLI, *words]), cwd=str(ROOT), env=env,
                stdout=printed, stderr=printed, start_new_session=True,
            )  # fmt: skip

    def train_on_two_hosts(self):
        self.train(0)
        self.train(1)
        self.wait_for_iterations(ranks=2)

    def link(self, host, state):
        line = ['ip', '-n', self.hosts.names[host], 'link', 'set', INTERFACE, state]
        subprocess.run(line, check=True)

    def kill(self, host):
        process = self.running.pop(host)
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(process.pid)
            for one in [*agent.children(recursive=True), agent]:
                one.kill()
        process.wait()

    def printed(self, host):
        return (self.folder / f'host{host}').read_text()

    def lines(self):
        """What the ranks wrote: time, number of ranks, iteration, samples."""
        found = []
        for path in self.samples.iterdir():
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith('\n'):
                    found.append(SimpleNamespace(**json.loads(line)))
        return sorted(found, key=lambda line: line.time)

    def wait_for_iterations(self, ranks, count=4):
        begun, deadline, wanted = time.time(), time.monotonic() + 240, count * ranks
        while sum(line.ranks == ranks for line in self.lines() if line.time > begun) < wanted:
            for host in [host for host, one in self.running.items() if one.poll() is not None]:
                raise AssertionError(f'host {host} ended:\n{self.printed(host)[-3000:]}')
            assert time.monotonic() < deadline, [self.printed(host)[-3000:] for host in (0, 1)]
            time.sleep(0.2)

    def check_result(self):
        """Whether all epochs were trained, on all samples, of which each rank takes as many."""
        state = read_checkpoint((self.folder / 'work' / 'last_checkpoint').read_text())
        # The last one is of an iteration in the last epoch, at whatever number they all end.
        assert state['meta']['epoch'] >= EPOCHS - 1
        lines = self.lines()
        assert {len(line.samples) for line in lines} == {STEP}
        assert len({one for line in lines for one in line.samples}) == SAMPLES


@pytest.fixture
def job(tmp_path, hosts):
    made = Job(tmp_path, hosts)
    yield made
    for host in list(made.running):
        made.kill(host)


def test_two_hosts_one_host_and_two_again(job):
    """A host is lost, and joins again; the other goes on meanwhile."""
    job.train_on_two_hosts()
    job.link(1, 'down')
    job.kill(1)
    job.wait_for_iterations(ranks=1)
    job.link(1, 'up')
    job.train(1)
    job.wait_for_iterations(ranks=2)
    commands = [job.running.pop(host) for host in (0, 1)]
    assert [one.wait(timeout=120) for one in commands] == [0, 0], job.printed(0)
    job.check_result()


def test_a_host_that_is_asked_to_end_leaves_at_once(job):
    """The scheduler takes a host away: the other one goes on with the next iteration."""
    job.train_on_two_hosts()
    leaving = job.running.pop(1)
    psutil.Process(leaving.pid).terminate()
    assert leaving.wait(timeout=60) == 143, job.printed(1)
    job.wait_for_iterations(ranks=1)
    assert job.running.pop(0).wait(timeout=120) == 0, job.printed(0)
    iterations = [line.iteration for line in job.lines() if line.ranks == 1]
    assert min(iterations) == 1 + max(line.iteration for line in job.lines() if line.ranks == 2)
    job.check_result()


def test_the_command_where_others_meet_is_killed(job):
    """The other one ends, and says what to do; the job goes on where it was."""
    job.train_on_two_hosts()
    job.kill(0)
    other = job.running.pop(1)
    assert other.wait(timeout=300) == 1
    told = job.printed(1)
    (line,) = re.findall(r'mmdevplug: LaunchError: .*', told)
    assert f'cannot meet the others at {job.hosts.address_of(0)}:29500' in line
    assert 'Traceback' not in told
    job.keeper = 1
    job.train(1)
    job.wait_for_iterations(ranks=1)
    assert job.running.pop(1).wait(timeout=120) == 0
    job.check_result()
