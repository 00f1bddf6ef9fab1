"""Several hosts on one machine: network namespaces joined by a bridge, with links of a given rate.

    with Hosts(4, rate='1gbit') as hosts:
        outputs = run_ranks([sys.executable, 'job.py'], ranks_per_host=2, hosts=hosts)

Every host has an interface ``eth0`` and a loopback of its own. What leaves a host and what arrives
at it is limited to the rate, loopback is not. The bridge lies in a namespace too, so the machine's
own network is left as it is, addresses of two jobs cannot collide, and removing the namespaces
removes everything. It needs root and iproute2.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

INTERFACE = 'eth0'
PORT = 29500  # Each job has a network of its own, where nobody else listens.
_PREFIX = 'mmdevplug'
_UNITS = {'kbit': 1e3, 'mbit': 1e6, 'gbit': 1e9}


class Availability(NamedTuple):
    """Whether hosts can be made here.

    Attributes:
        possible (bool): Whether :class:`Hosts` works.
        reason (str): What is missing; empty if nothing is.
    """

    possible: bool
    reason: str = ''


def available() -> Availability:
    """Try to make and to shape a link between two namespaces."""
    missing = [name for name in ('ip', 'tc') if shutil.which(name) is None]
    if missing:
        return Availability(False, f'no {" and no ".join(missing)} on PATH; install iproute2')
    if os.geteuid() != 0:
        return Availability(False, 'network namespaces need root')
    try:
        with Hosts(1, rate='1gbit'):
            return Availability(True)
    except HostsError as error:
        return Availability(False, str(error))


class HostsError(RuntimeError):
    """Hosts could not be made, or a job on them failed."""


def bits_per_second(rate: str) -> float:
    """Read a rate such as ``'200mbit'`` or ``'1gbit'``.

    Raises:
        HostsError: If it is written in another way.
    """
    found = re.fullmatch(r'(\d+(?:\.\d+)?)([kmg]bit)', rate)
    if found is None:
        raise HostsError(
            f"rate={rate!r}: expected a number with kbit, mbit or gbit, e.g. '200mbit'. Pass one."
        )
    return float(found.group(1)) * _UNITS[found.group(2)]


class Hosts:
    """A number of hosts that exist inside a ``with`` statement.

    Args:
        count (int): Number of hosts, 1 to 250.
        rate (str, optional): The rate of each host's link in either direction, as tc writes it.
            Defaults to None: not limited.

    Raises:
        HostsError: If they cannot be made.
    """

    def __init__(self, count: int, rate: Optional[str] = None) -> None:
        if not 1 <= count <= 250:
            raise HostsError(f'{count} hosts: expected 1 to 250.')
        self.count = count
        self.rate = rate
        self.bits_per_second = None if rate is None else bits_per_second(rate)
        name = f'{_PREFIX}-{os.getpid()}-{id(self):x}'
        self.names = [f'{name}-{index}' for index in range(count)]
        self._switch = f'{name}-switch'
        self._sigterm: Any = None

    @property
    def address(self) -> str:
        """The address of the first host."""
        return self.address_of(0)

    @staticmethod
    def address_of(host: int) -> str:
        return f'10.0.0.{host + 1}'

    def __enter__(self) -> 'Hosts':
        _remove_leftovers()
        # A termination ends the `with` statement like Ctrl-C does.
        if threading.current_thread() is threading.main_thread():
            self._sigterm = signal.signal(signal.SIGTERM, _exit)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for name in [*self.names, self._switch]:
            # A namespace that was not made is nothing to remove.
            subprocess.run(['ip', 'netns', 'delete', name], stderr=subprocess.DEVNULL)
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)
            self._sigterm = None

    def _make(self) -> None:
        switch = self._switch
        _ip('netns', 'add', switch)
        _ip('-n', switch, 'link', 'add', 'bridge', 'up', 'type', 'bridge')
        for index, name in enumerate(self.names):
            port = f'port{index}'
            _ip('netns', 'add', name)
            ends = ['type', 'veth', 'peer', 'name', port, 'netns', switch]
            _ip('-n', name, 'link', 'add', INTERFACE, *ends)
            _ip('-n', name, 'address', 'add', f'{self.address_of(index)}/24', 'dev', INTERFACE)
            _ip('-n', name, 'link', 'set', 'lo', 'up')
            _ip('-n', name, 'link', 'set', INTERFACE, 'up')
            _ip('-n', switch, 'link', 'set', port, 'master', 'bridge', 'up')
            _use_cubic(name)
            if self.rate is not None:
                self._shape(name, INTERFACE)  # what leaves the host
                self._shape(switch, port)  # what arrives at it

    def _shape(self, namespace: str, interface: str) -> None:
        # The bucket takes a whole segment of 64 KB, which the kernel cuts up only behind it, and
        # 2 ms of traffic, less than which a busy machine's timer leaves unused.
        burst = max(128 << 10, int(self.bits_per_second / 8 * 2e-3))
        shape = ['tbf', 'rate', self.rate, 'burst', str(burst), 'latency', '50ms']
        _run('tc', '-n', namespace, 'qdisc', 'add', 'dev', interface, 'root', *shape)

    def command(self, host: int, command: Sequence[str]) -> List[str]:
        """The command line that runs ``command`` on a host."""
        return ['ip', 'netns', 'exec', self.names[host], *command]

    def counters(self) -> List[Dict[str, int]]:
        """The bytes that each host has sent and received by its link (``'tx'``, ``'rx'``)."""
        return [
            {
                way: int(_run(*self.command(host, ['cat', counter_file(way)])))
                for way in ('tx', 'rx')
            }
            for host in range(self.count)
        ]


def counter_file(way: str = 'tx') -> str:
    """Where a process on a host reads the bytes that its host has sent (``'tx'``, ``'rx'``)."""
    return f'/sys/class/net/{INTERFACE}/statistics/{way}_bytes'


def launch_variables(
    host: int, local_rank: int, ranks_per_host: int, hosts: Optional[Hosts], port: int
) -> Dict[str, str]:
    """What torchrun sets, for a rank of a job on several hosts or, without hosts, on this one."""
    count = 1 if hosts is None else hosts.count
    numbers = dict(
        RANK=host * ranks_per_host + local_rank,
        LOCAL_RANK=local_rank,
        WORLD_SIZE=count * ranks_per_host,
        LOCAL_WORLD_SIZE=ranks_per_host,
        GROUP_RANK=host,
        GROUP_WORLD_SIZE=count,
        NODE_RANK=host,
        MASTER_PORT=port,
        OMP_NUM_THREADS=1,
    )
    variables = {name: str(number) for name, number in numbers.items()}
    variables['MASTER_ADDR'] = '127.0.0.1' if hosts is None else hosts.address
    if hosts is not None:
        variables['GLOO_SOCKET_IFNAME'] = INTERFACE
    return variables


def run_ranks(
    command: Sequence[str],
    ranks_per_host: int,
    hosts: Optional[Hosts] = None,
    environ: Optional[Mapping[str, str]] = None,
    timeout: float = 3600,
) -> List[str]:
    """Run a command in every rank of a job.

    Args:
        command (Sequence[str]): The same for all ranks.
        ranks_per_host (int): Number of processes on each host.
        hosts (Hosts, optional): Defaults to None: all on this machine, over loopback.
        environ (Mapping, optional): More variables for all ranks.
        timeout (float): Seconds until all must have ended. Defaults to an hour.

    Returns:
        List[str]: What each rank wrote to its standard output.

    Raises:
        HostsError: If a rank failed or they did not end; the others are ended then.
    """
    port = _free_port() if hosts is None else PORT
    places = [
        (host, local_rank)
        for host in range(1 if hosts is None else hosts.count)
        for local_rank in range(ranks_per_host)
    ]
    workers: List[subprocess.Popen] = []
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile('w+')) for _ in places]
        try:
            for (host, local_rank), output in zip(places, outputs):
                variables = launch_variables(host, local_rank, ranks_per_host, hosts, port)
                env = {**os.environ, **variables, **(environ or {})}
                line = list(command) if hosts is None else hosts.command(host, command)
                workers.append(subprocess.Popen(line, env=env, stdout=output))
            _wait_for(workers, timeout)
            return [_read(output) for output in outputs]
        finally:
            for worker in workers:
                worker.kill()  # nothing happens to one that has ended
                worker.wait()


def _wait_for(workers: Sequence[subprocess.Popen], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [worker.poll() for worker in workers]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            # The others have a moment to say what they know of it.
            time.sleep(2)
            told = ', '.join(
                f'rank {rank} with exit status {code}' for rank, code in failed.items()
            )
            raise HostsError(f'{told} failed; its own message is above.')
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return
        if time.monotonic() > deadline:
            raise HostsError(f'ranks {running} did not end within {timeout:.0f} s.')
        time.sleep(0.05)


def _read(output: Any) -> str:
    output.seek(0)
    return output.read()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def _exit(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _use_cubic(namespace: str) -> None:
    """Take the usual congestion control, so that figures do not depend on the machine's choice."""
    folder = '/proc/sys/net/ipv4/tcp'
    script = f'grep -qw cubic {folder}_available_congestion_control && ' + (
        f'echo cubic > {folder}_congestion_control || true'
    )
    _run('ip', 'netns', 'exec', namespace, 'sh', '-c', script)


def _remove_leftovers() -> None:
    """Remove the namespaces of processes that were killed before they could."""
    for line in _ip('netns', 'list').splitlines():
        found = re.match(rf'{_PREFIX}-(\d+)-\S+', line)
        if found is not None and not os.path.exists(f'/proc/{found.group(1)}'):
            subprocess.run(['ip', 'netns', 'delete', found.group()], stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> str:
    return _run('ip', *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostsError(f'`{" ".join(command)}` failed: {done.stderr.strip()}')
    return done.stdout
