"""A real Slurm of two hosts, both of which are this machine."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.commands import wait_until
from tests.ranks import free_port

PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'srun', 'sbatch', 'sinfo')

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=part Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Why Slurm cannot be started here, None if it can."""
    path = os.pathsep.join([os.environ.get('PATH', ''), '/usr/sbin'])
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f'{", ".join(absent)} not found: apt-get install slurm-wlm munge'
    return None if os.geteuid() == 0 else 'slurmd changes users: run the tests as root'


@contextmanager
def slurm_cluster():
    """Run Slurm's daemons in a folder of their own; yield the variables that its commands need."""
    path = os.pathsep.join([os.environ['PATH'], '/usr/sbin'])
    # Not below pytest's folder: munged wants one that no one else can write, with a short name.
    folder = Path(tempfile.mkdtemp(prefix='slurm-'))
    folder.chmod(0o711)
    environ = dict(os.environ, PATH=path, SLURM_CONF=str(folder / 'slurm.conf'))
    (folder / 'state').mkdir()
    key = folder / 'munge.key'
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = [free_port() for _ in range(3)]
    text = CONFIG.format(host=socket.gethostname().split('.')[0], ports=ports, folder=folder,
                         user='root')  # fmt: skip
    (folder / 'slurm.conf').write_text(text)
    names = dict(key='munge.key', socket='munge.socket', pid='munged.pid', log='munged.log')
    options = [f'--{name}-file={folder / file}' for name, file in names.items()]
    options[1] = f'--socket={folder / "munge.socket"}'

    def run(*command):
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    try:
        started = [
            run('munged', '--force', *options, f'--seed-file={folder / "seed"}'),
            run('slurmctld'),
            run('slurmd', '-N', 'node1'),
            run('slurmd', '-N', 'node2'),
        ]
        assert [done.returncode for done in started] == [0, 0, 0, 0], started
        idle = ['2', 'idle']
        words = ('sinfo', '-h', '-o', '%D %T')
        wait_until(lambda: run(*words).stdout.split() == idle, 60, lambda: run('sinfo').stdout)
        yield environ
        # The process that runs a batch script waits for slurmctld to hear that it ended.
        deadline = time.monotonic() + 30
        while run('squeue', '-h').stdout and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        pids = [int(file.read_text()) for file in folder.glob('*.pid')]
        daemons = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        for daemon in daemons:
            daemon.terminate()
        _, alive = psutil.wait_procs(daemons, timeout=10)
        for daemon in alive:
            daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)
