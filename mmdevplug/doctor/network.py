"""Section *network*: port, host name and interfaces."""

import os
import socket
import threading
from typing import Any, Dict, Iterator, List, Mapping, Optional

import psutil

from .findings import Finding

SECTION = 'network'
DEFAULT_PORT = 29500  # torch.distributed's own
LOOK_UP_SECONDS = 10.0


def examine(environ: Optional[Mapping[str, str]] = None) -> List[Finding]:
    """Look at what rank 0 listens on and how ranks find each other.

    Args:
        environ (Mapping, optional): Defaults to None: ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    addresses = interfaces()
    listed = '; '.join(f'{name}: {", ".join(found)}' for name, found in addresses.items())
    return [
        Finding(SECTION, 'note', f'interfaces: {listed}', data=dict(interfaces=addresses)),
        *_check_port(environ.get('MASTER_PORT')),
        *_check_host_name(addresses),
        *_check_interface_variables(environ, list(addresses)),
    ]


def interfaces() -> Dict[str, List[str]]:
    """The interfaces that have addresses, with these."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [entry.address.split('%')[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


# the port ---------------------------------------------------------------------------------------


def _check_port(value: Optional[str]) -> Iterator[Finding]:
    text = str(DEFAULT_PORT) if value is None else value.strip()
    if not text.isdigit() or not 0 < int(text) < 65536:
        yield Finding(
            SECTION,
            'error',
            f'MASTER_PORT={value!r}',
            'expected a port from 1 to 65535.',
            f'export MASTER_PORT={free_port()}',
        )
        return
    port = int(text)
    problem = _cannot_listen(port)
    if not problem:
        yield Finding(SECTION, 'ok', f'port {port} is free')
        return
    owner = _listener(port)
    if value is None:
        yield Finding(
            SECTION,
            'warning',
            f'port {port} is taken{owner}: {problem}',
            'tools/dist_train.sh and torchrun take it unless they are given another; '
            '`mmdevplug train --nproc N` finds a free one by itself.',
            f'PORT={free_port()} bash tools/dist_train.sh CONFIG NUM_DEVICES',
        )
        return
    yield Finding(
        SECTION,
        'error',
        f'MASTER_PORT={port} is taken{owner}: {problem}',
        'rank 0 cannot hold the store there, and the job does not start.',
        f'export MASTER_PORT={free_port()}',
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
    """Who listens on a port, where the system tells."""
    try:
        connections = psutil.net_connections('inet')
    except psutil.Error:
        return ''  # another user's, or a system that tells only root
    for found in connections:
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
            return f' by process {found.pid} ({_name_of(found.pid)})'
    return ''


def _name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return 'which has ended'


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(('', 0))
        return probe.getsockname()[1]


# the host's name --------------------------------------------------------------------------------


def _check_host_name(addresses: Dict[str, List[str]]) -> Iterator[Finding]:
    name = socket.gethostname()
    found = look_up(name)
    outward = [i for i, a in addresses.items() if not all(map(_is_loopback, a))]
    interface = (outward or list(addresses) or ['eth0'])[0]
    if isinstance(found, str):
        yield Finding(
            SECTION,
            'warning',
            f'the host name {name!r} is not known: {found}',
            'gloo looks it up unless it is told an interface. Jobs on one host are: mmdevplug '
            'takes the loopback interface for them. Jobs on several hosts fail.',
            f'export GLOO_SOCKET_IFNAME={interface}',
        )
        return
    yield Finding(SECTION, 'ok', f'the host name {name!r} is {", ".join(found)}')
    if outward and all(map(_is_loopback, found)):
        yield Finding(
            SECTION,
            'note',
            f'the host name {name!r} is known as a loopback address alone',
            'on several hosts gloo would listen where the others cannot reach it.',
            f'export GLOO_SOCKET_IFNAME={interface}',
        )


def look_up(name: str, seconds: float = LOOK_UP_SECONDS) -> Any:
    """Look up a host's name, without waiting for ever for a name server.

    Returns:
        list or str: The addresses, or what is wrong.
    """
    answer: List[Any] = [f'no answer within {seconds:.0f} s']

    def ask() -> None:
        try:
            answer[0] = sorted({found[4][0] for found in socket.getaddrinfo(name, None)})
        except OSError as error:
            answer[0] = str(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0]


def _is_loopback(address: str) -> bool:
    return address.startswith('127.') or address == '::1'


# variables that name interfaces -----------------------------------------------------------------


def _check_interface_variables(environ: Mapping[str, str], names: List[str]) -> Iterator[Finding]:
    for variable in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME'):
        value = environ.get(variable)
        if value is None:
            continue
        missing = _missing_interfaces(variable, value, names)
        if missing:
            yield Finding(
                SECTION,
                'error',
                f'{variable}={value!r}, but there is no interface {", ".join(missing)}; there are '
                f'{", ".join(names)}',
                'the process group does not start.',
                f'unset {variable}',
            )
        else:
            yield Finding(SECTION, 'ok', f'{variable}={value!r} is there')


def _missing_interfaces(variable: str, value: str, names: List[str]) -> List[str]:
    if variable.startswith('GLOO'):
        return [name for name in value.split(',') if name not in names]
    if value.startswith('^'):
        return []  # these are left out
    exact = value.startswith('=')
    wanted = value.lstrip('=').split(',')
    return [
        prefix
        for prefix in wanted
        if not any(name == prefix if exact else name.startswith(prefix) for name in names)
    ]
