"""Start commands as users, schedulers and containers do, and look at their end from outside."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mmdevplug.cli import launch
from tests.cli.running import config
from tests.commands import environment
from tests.jobs import ROOT, load_file


def write_config(folder, workers=0, **hook):
    """A job without an end, whose ranks note their process and their last iteration."""
    hook = dict(dict(type='Accident', note=str(folder / 'notes'), pause=0.05), **hook)
    lines = (
        f'custom_hooks = [{hook!r}]\n'
        'train_cfg = dict(max_epochs=1000, val_interval=1000)\n'
        f'train_dataloader = dict(batch_size=100, num_workers={workers})\n'
        'default_hooks = dict(checkpoint=dict(interval=1000))\n'
    )
    return str(config(folder, lines, ['tests.fault_tolerance.accidents']))


class Started:
    """A command and everything below it."""

    def __init__(self, folder, command, **environ):
        self.folder, self.notes = folder, folder / 'notes'
        self.notes.mkdir(exist_ok=True)
        for note in self.notes.iterdir():
            note.unlink()
        env = environment(**environ)
        self.path = folder / 'printed'
        with open(self.path, 'w') as output:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env=env, stdout=output, stderr=output,
                start_new_session=True,
                # The tests themselves may run under nohup, which children inherit.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )  # fmt: skip
        self.below = {}

    @property
    def printed(self):
        return self.path.read_text()

    def wait_until(self, reached, seconds=150):
        deadline = time.monotonic() + seconds
        while not reached():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(self.printed)
            time.sleep(0.05)

    def done(self, rank):
        note = self.notes / str(rank)
        words = note.read_text().split() if note.exists() else []
        return int(words[1]) if len(words) == 2 else 0

    def wait_for_iteration(self, iteration, ranks=2):
        self.wait_until(lambda: all(self.done(rank) >= iteration for rank in range(ranks)))

    def look(self):
        """Remember every process below the command, if it still runs."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.below[process.pid] = process
        return list(self.below.values())

    def end(self, number=None):
        """Send a signal to the command alone; its exit status, once nothing is left."""
        self.look()
        try:
            if number is not None:
                os.kill(self.process.pid, number)
            status = self.process.wait(120)
            _, left = psutil.wait_procs(self.below.values(), timeout=10)
            assert left == [], self.printed
        finally:
            self.kill()
        return status

    def kill(self):
        self.look()
        for process in self.below.values():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()


class NoRanks:
    """Replace PyTorch's ``elastic_launch``, and record its arguments."""

    def __init__(self, monkeypatch, counted=7):
        self.configs, self.argv, self.environ = [], [], {}
        monkeypatch.setattr(launch, '_start_server', lambda: 'spawn')
        monkeypatch.setattr(launch, 'addresses_between', lambda name: ('10.0.0.9', name))
        monkeypatch.setattr(launch, '_count', lambda word, method, args: counted)
        monkeypatch.setattr('torch.distributed.launcher.api.elastic_launch', self)

    def __call__(self, config, entry):
        self.configs.append(config)
        return self.start

    def start(self, module, argv):
        self.argv = argv
        self.environ = dict(os.environ)

    @property
    def told(self):
        """The newest job: processes, hosts, restarts, and how they meet."""
        one = self.configs[-1]
        place = (one.rdzv_backend, one.rdzv_endpoint, one.rdzv_configs.get('rank'))
        return (one.nproc_per_node, one.min_nodes, one.max_nodes, one.max_restarts, *place)


def check_saved(job, work_dir, ranks=2):
    """All ranks stopped after the same iteration, which the newest checkpoint is of."""
    name = Path((work_dir / 'last_checkpoint').read_text()).name
    (stopped,) = {job.done(rank) for rank in range(ranks)}
    assert name == f'interrupted_iter_{stopped}.pth'
    assert load_file(work_dir / name)['meta']['iter'] == stopped
    assert 'Traceback' not in job.printed
    return stopped


def in_container(command):
    """A command as process 1 of its own process namespace, as containers have it."""
    return ['unshare', '--pid', '--fork', '--mount-proc', '--kill-child', *command]


def need_namespaces():
    done = subprocess.run(in_container(['true']), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'no namespaces for processes: {done.stderr}')


class Container(Started):
    """The same as process 1; signals go to it and not to ``unshare``."""

    def __init__(self, folder, command, **environ):
        super().__init__(folder, in_container(command), **environ)

    def end(self, number=signal.SIGTERM, grace=30):
        """End it as a kubelet and `docker stop` do, with Kubernetes' default grace; the status."""
        (first,) = psutil.Process(self.process.pid).children()
        self.look()
        first.send_signal(number)
        try:
            return self.process.wait(grace)
        except subprocess.TimeoutExpired:
            first.kill()
            return self.process.wait()


#: A user whom the system does not know, as Kubernetes' `runAsUser` may name.
USER = 12345
BOX = f"""set -e
mkdir -p "$0/t"
chown -R {USER} "$0"
mount --bind "$0" "$0"
mount -t tmpfs -o mode=1777,size=64m tmpfs /dev/shm
mount -o remount,ro,bind /
export HOME=/ TMPDIR="$0/t"
unset USER LOGNAME
exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs \
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search "$@"
"""


def in_box(folder, command):
    """A command of a container in which a user other than root has few rights.

    Only the folder can be written to, and /dev/shm has the 64 MB that Docker gives. As in an
    image, everything can be read: here with a capability, as a checkout may be in root's home.
    """
    return ['bash', '-c', BOX, str(folder), *map(str, command)]
