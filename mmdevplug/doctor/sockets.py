"""What the processes of a job listen on."""

import os
from typing import Any, Dict, List

import psutil

from .findings import Finding

SECTION = 'network'


def listening_here(rank: int) -> List[Dict[str, Any]]:
    """The addresses that this process listens on, and torchrun if it is its first worker.

    Args:
        rank (int): Of this process.

    Returns:
        list: Of dicts with ``who``, ``address`` and ``port``.
    """
    found = _listening(os.getpid(), f'rank {rank}')
    if 'TORCHELASTIC_RUN_ID' in os.environ and os.environ.get('LOCAL_RANK') == '0':
        found += _listening(os.getppid(), 'torchrun')
    return found


def _listening(pid: int, who: str) -> List[Dict[str, Any]]:
    process = psutil.Process(pid)
    # psutil renamed it in release 6.
    ask = getattr(process, 'net_connections', None) or process.connections
    try:
        connections = ask('inet')
    except psutil.Error:
        return []  # a system that does not tell
    return [
        dict(who=who, address=found.laddr.ip, port=found.laddr.port)
        for found in connections
        if found.status == psutil.CONN_LISTEN
    ]


def examine(listening: List[Dict[str, Any]], single_host: bool = True) -> List[Finding]:
    """Say which of the addresses can be reached from other hosts.

    Args:
        listening (list): Of all ranks.
        single_host (bool): Whether no other host has to reach them.
    """
    inside = [one for one in listening if _is_loopback(one['address'])]
    outside = [one for one in listening if not _is_loopback(one['address'])]
    findings = []
    if inside:
        findings.append(
            Finding(SECTION, 'ok', f'on the loopback interface alone: {_name(inside)}')
        )
    if outside:
        findings.append(
            Finding(
                SECTION,
                'warning' if single_host else 'note',
                f'reachable from other hosts: {_name(outside)}',
                "whoever connects can read and write the job's store. PyTorch's store listens on "
                'all interfaces unless it is handed a socket, which its older releases do not '
                "take; gloo and vendors' backends choose their ports by themselves, and "
                'GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME chooses the interface alone.',
                f'sudo iptables -A INPUT -p tcp --dport {outside[0]["port"]} ! -i lo -j DROP'
                if single_host
                else '',
            )
        )
    return findings


def _name(found: List[Dict[str, Any]]) -> str:
    return ', '.join(f'{one["who"]} at {one["address"]}:{one["port"]}' for one in found)


def _is_loopback(address: str) -> bool:
    return address.startswith(('127.', '::ffff:127.')) or address == '::1'
