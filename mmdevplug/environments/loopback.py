"""Hold torch.distributed's store on the loopback interface, for jobs that stay on one host."""

import ipaddress
import socket
from datetime import timedelta
from typing import Any, Optional, Tuple

import psutil

from mmdevplug.errors import LaunchError

LOOPBACK = '127.0.0.1'
_BACKLOG = 4096


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from this host alone.

    Examples:
        >>> is_loopback('localhost'), is_loopback('127.0.0.1'), is_loopback('10.0.0.1')
        (True, True, False)
    """
    if address == 'localhost':
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False  # A name, which may be known on other hosts.


def loopback_store(
    port: int, address: str = LOOPBACK, timeout: timedelta = timedelta(minutes=30)
) -> Tuple[int, object]:
    """Make the store of a single-host job, which listens for as long as the store is kept.

    At port 0 it chooses a free one. Returns the port and the store, None where this PyTorch opens
    its ports by itself.
    """
    from torch import distributed as torch_dist  # late: commands read this module

    address = LOOPBACK if address == 'localhost' else address
    listener = socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    takes_socket = 'master_listen_fd' in (torch_dist.TCPStore.__init__.__doc__ or '')
    try:
        listener.bind((address, port))
        # Otherwise the socket is closed below, which would reset the connection of a rank that
        # came early, and end it; where nobody listens yet, a rank tries again.
        if takes_socket:
            listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise LaunchError(
            f'MASTER_PORT={port}: rank 0 cannot listen on {address}:{port}: {error}. Expected a '
            f'free port; another job may use this one. Choose another: PORT=... '
            f'tools/dist_train.sh, or mmdevplug train --nproc N, which finds one by itself.'
        ) from error
    port = listener.getsockname()[1]
    if not takes_socket:
        listener.close()  # An older PyTorch listens by itself, on all interfaces.
        return port, None
    # The store closes the socket.
    options: Any = dict(timeout=timeout, multi_tenant=True, master_listen_fd=listener.detach())
    try:
        store = torch_dist.TCPStore(address, port, None, True, **options)
    except RuntimeError as error:
        # PyTorch 2.4 to 2.6: the store's newer kind takes no socket.
        if 'libuv' not in str(error):
            raise
        store = torch_dist.TCPStore(address, port, None, True, use_libuv=False, **options)
    return port, store


def interface_of(address: str) -> Optional[str]:
    """The network interface of this host that has an address; None if none has it."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition('%')[0] == address for each in found):
            return name
    return None


def addresses_between(name: str) -> Tuple[str, str]:
    """The address of this host by which the one of a name reaches it, and that host's address."""
    family, kind, *_, place = socket.getaddrinfo(name, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return probe.getsockname()[0], str(place[0])
