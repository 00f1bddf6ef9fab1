"""Section *network*: port, host name, interfaces, and what a job listens on."""

import os
import socket
import threading
from typing import Any, Dict, Iterator, List, Mapping, Optional, Union

import psutil

from mmdevplug.environments.launch_variables import DEFAULT_PORT

from .findings import Finding, Section

section = Section('network')
LOOK_UP_SECONDS = 10.0


def examine(environ: Optional[Mapping[str, str]] = None) -> Iterator[Finding]:
    """Examine where rank 0 listens and how ranks find each other (from ``os.environ``)."""
    environ = os.environ if environ is None else environ
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = {
        name: [entry.address.split('%')[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    interfaces = {name: addresses for name, addresses in interfaces.items() if addresses}
    listed = '; '.join(f'{name}: {", ".join(found)}' for name, found in interfaces.items())
    yield section.note(f'interfaces: {listed}', data=dict(interfaces=interfaces))
    yield _check_port(environ.get('MASTER_PORT'))
    yield from _check_host_name(interfaces)
    for variable in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME'):
        if variable in environ:
            yield _check_interfaces(variable, environ[variable], list(interfaces))


def _check_port(value: Optional[str]) -> Finding:
    text = str(DEFAULT_PORT) if value is None else value.strip()
    if not text.isdigit() or not 0 < int(text) < 65536:
        return section.error(
            f'MASTER_PORT={value!r}',
            'expected a port from 1 to 65535.',
            f'export MASTER_PORT={_free_port()}',
        )
    port = int(text)
    problem = _cannot_listen(port)
    if not problem:
        return section.ok(f'port {port} is free')
    taken = f'is taken{_listener(port)}: {problem}'
    if value is None:
        return section.warning(
            f'port {port} {taken}',
            'tools/dist_train.sh and torchrun use it by default; `mmdevplug train --nproc N` '
            'finds a free one by itself.',
            f'PORT={_free_port()} bash tools/dist_train.sh CONFIG NUM_DEVICES',
        )
    return section.error(
        f'MASTER_PORT={port} {taken}',
        'rank 0 cannot hold the store there, and the job does not start.',
        f'export MASTER_PORT={_free_port()}',
    )


def _cannot_listen(port: int) -> str:
    with socket.socket() as probe:
        # As the store does it: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(('', port))
            probe.listen(1)
        except OSError as error:
            return str(error)
    return ''


def _listener(port: int) -> str:
    """Name the process that listens on a port; empty if the system does not show it."""
    try:
        for found in psutil.net_connections('inet'):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return f' by process {found.pid} ({_name_of_process(found.pid)})'
    except psutil.Error:
        pass
    return ''


def _name_of_process(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return 'which has ended'
    except psutil.Error:
        return 'whose name the system does not show'


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('', 0))
        return probe.getsockname()[1]


def _check_host_name(interfaces: Dict[str, List[str]]) -> Iterator[Finding]:
    name = socket.gethostname()
    found = _look_up(name)
    outward = [i for i, addresses in interfaces.items() if not all(map(_is_loopback, addresses))]
    remedy = f'export GLOO_SOCKET_IFNAME={(outward or list(interfaces) or ["eth0"])[0]}'
    if isinstance(found, str):
        yield section.warning(
            f'the host name {name!r} is not known: {found}',
            'gloo looks it up unless GLOO_SOCKET_IFNAME names an interface. For jobs on one host '
            'mmdevplug chooses the loopback interface. Jobs on several hosts fail.',
            remedy,
        )
        return
    told = f'the host name {name!r} is {", ".join(found)}'
    if outward and all(map(_is_loopback, found)):
        yield section.note(
            f'{told}: loopback alone',
            'on several hosts gloo would listen where the others cannot reach it.',
            remedy,
        )
    else:
        yield section.ok(told)


def _look_up(name: str) -> Union[List[str], str]:
    """Return the addresses of a host, or what is wrong; a name server may not answer."""
    answer: List[Any] = [f'no answer within {LOOK_UP_SECONDS:.0f} s']

    def ask() -> None:
        try:
            answer[0] = sorted({found[4][0] for found in socket.getaddrinfo(name, None)})
        except OSError as error:
            answer[0] = str(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LOOK_UP_SECONDS)
    return answer[0]


def _is_loopback(address: str) -> bool:
    return address.startswith(('127.', '::ffff:127.')) or address == '::1'


def _check_interfaces(variable: str, value: str, names: List[str]) -> Finding:
    if variable.startswith('GLOO'):
        missing = [name for name in value.split(',') if name not in names]
    elif value.startswith('^'):
        missing = []  # names that NCCL leaves out
    elif value.startswith('='):
        missing = [name for name in value[1:].split(',') if name not in names]
    else:
        prefixes = value.split(',')
        missing = [one for one in prefixes if not any(name.startswith(one) for name in names)]
    if not missing:
        return section.ok(f'{variable}={value!r} is there')
    return section.error(
        f'{variable}={value!r}, but there is no interface {", ".join(missing)}; there are '
        f'{", ".join(names)}',
        'the process group does not start.',
        f'unset {variable}',
    )


# what a job listens on --------------------------------------------------------------------------


def listening_here(rank: int) -> List[Dict[str, Any]]:
    """List where this process listens, and torchrun if this is its first worker."""
    processes = {os.getpid(): f'rank {rank}'}
    if 'TORCHELASTIC_RUN_ID' in os.environ and os.environ.get('LOCAL_RANK') == '0':
        processes[os.getppid()] = 'torchrun'
    found = []
    for pid, who in processes.items():
        process = psutil.Process(pid)
        # psutil renamed it in release 6.
        get_connections = getattr(process, 'net_connections', None) or process.connections
        try:
            connections = get_connections('inet')
        except psutil.Error:
            continue  # the system does not show them
        for one in connections:
            if one.status == psutil.CONN_LISTEN:
                found.append(dict(who=who, address=one.laddr.ip, port=one.laddr.port))
    return found


def examine_listening(listening: List[Dict[str, Any]], single_host: bool) -> Iterator[Finding]:
    """Report which addresses of a job's ranks other hosts can reach."""
    inside = [one for one in listening if _is_loopback(one['address'])]
    outside = [one for one in listening if not _is_loopback(one['address'])]
    if inside:
        yield section.ok(f'on the loopback interface alone: {_name(inside)}')
    if outside:
        port = outside[0]['port']
        yield section.finding(
            'warning' if single_host else 'note',
            f'reachable from other hosts: {_name(outside)}',
            "whoever connects can read and write the job's store. PyTorch's store listens on all "
            'interfaces unless it is given a socket, which older releases do not accept; gloo and '
            "vendors' backends choose their ports themselves, and GLOO_SOCKET_IFNAME or "
            'NCCL_SOCKET_IFNAME only chooses the interface.',
            f'sudo iptables -A INPUT -p tcp --dport {port} ! -i lo -j DROP' if single_host else '',
        )


def _name(found: List[Dict[str, Any]]) -> str:
    return ', '.join(f'{one["who"]} at {one["address"]}:{one["port"]}' for one in found)
