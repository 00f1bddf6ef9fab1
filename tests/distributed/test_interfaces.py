"""Ranks on hosts whose own names lead to 127.0.1.1, as /etc/hosts of Debian and Ubuntu says."""

import ctypes
import os
import socket

import pytest
import torch
from torch import distributed as torch_dist

from mmdevplug import init_device
from mmdevplug.environments.loopback import interface_of
from tests.on_hosts import run_on_hosts
from tests.ranks import RanksFailed

_CLONE_NEWUTS = 0x04000000
_MS_BIND = 4096


def meet(folder, address, by_name, interface):
    """Start a process group, on a host with a name of its own; return the interface and a sum."""
    libc = ctypes.CDLL(None, use_errno=True)
    host = int(os.environ['GROUP_RANK'])
    assert libc.unshare(_CLONE_NEWUTS) == 0
    socket.sethostname(f'host-{host}')
    file = os.path.join(folder, f'hosts of {os.environ["RANK"]}')
    with open(file, 'w') as text:
        text.write(f'127.0.0.1 localhost\n127.0.1.1 host-{host}\n')
        text.write(f'{address} host-0\n' if host else '')
    assert libc.mount(file.encode(), b'/etc/hosts', None, ctypes.c_ulong(_MS_BIND), None) == 0
    assert socket.gethostbyname(f'host-{host}') == '127.0.1.1'
    os.environ.pop('GLOO_SOCKET_IFNAME')
    if interface:
        os.environ['GLOO_SOCKET_IFNAME'] = interface
    os.environ['MASTER_ADDR'] = 'host-0' if by_name else address
    init_device('pytorch', 'cpu', timeout=30)
    rank = torch.tensor([float(torch_dist.get_rank())])
    torch_dist.all_reduce(rank)
    return os.environ['GLOO_SOCKET_IFNAME'], rank.item()


@pytest.mark.parametrize('by_name', [False, True])
def test_names_that_lead_to_the_host_itself(hosts, tmp_path, by_name):
    met = run_on_hosts(meet, 2, hosts, str(tmp_path), hosts.address, by_name, '', timeout=100)
    assert {total for _, total in met} == {6.0}
    assert 'lo' not in {name for name, _ in met}


def test_an_interface_that_others_do_not_reach_is_named_soon(hosts, tmp_path):
    with pytest.raises(RanksFailed, match='On each host set GLOO_SOCKET_IFNAME') as failed:
        run_on_hosts(meet, 1, hosts, str(tmp_path), hosts.address, False, 'lo', timeout=100)
    assert 'over gloo of GLOO_SOCKET_IFNAME=lo' in str(failed.value)


def test_the_interface_of_an_address():
    assert interface_of('127.0.0.1') in ('lo', 'lo0')
    assert interface_of('192.0.2.1') is None
