"""Running a function in ranks on several hosts: see :mod:`benchmarks.hosts`.

Like :func:`benchmarks.hosts.run_ranks`, but ranks are forked from the server of
:mod:`tests.ranks`, which has imported PyTorch already.
"""

import ctypes
import os

import pytest

from benchmarks.hosts import PORT, available, launch_variables
from tests.ranks import run_ranks

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_MNT_DETACH = 2


def need_hosts():
    """Skip where no hosts can be made in network namespaces."""
    possible, reason = available()
    if not possible:
        pytest.skip(f'no hosts in network namespaces: {reason}')


def run_on_hosts(function, ranks_per_host, hosts, *args, timeout=240):
    """Call ``function(*args)`` in every rank of a job, and give what each rank returned.

    ``ranks_per_host`` may be a list, with the number of each host.
    """
    given = isinstance(ranks_per_host, list)
    counts = ranks_per_host if given else [ranks_per_host] * hosts.count
    places = [(host, rank) for host, count in enumerate(counts) for rank in range(count)]
    variables = {
        number: dict(
            launch_variables(host, rank, counts[host], hosts, PORT),
            RANK=str(number),
            WORLD_SIZE=str(len(places)),
        )
        for number, (host, rank) in enumerate(places)
    }
    return run_ranks(
        _on_host, len(places), hosts.names, function, args, environ_of=variables, timeout=timeout
    )


def _on_host(names, function, args):
    _enter(names[int(os.environ['GROUP_RANK'])])
    return function(*args)


def _enter(namespace):
    """Move this process, which has no other thread yet, to a host as ``ip netns exec`` does.

    Its /sys has the interfaces of the host.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function, *arguments):
        if getattr(libc, function)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f'{function}: {os.strerror(number)}', namespace)

    with open(f'/run/netns/{namespace}') as file:
        call('setns', file.fileno(), _CLONE_NEWNET)
    call('unshare', _CLONE_NEWNS)
    call('mount', b'', b'/', b'none', ctypes.c_ulong(_MS_SLAVE | _MS_REC), None)
    call('umount2', b'/sys', _MNT_DETACH)
    call('mount', namespace.encode(), b'/sys', b'sysfs', ctypes.c_ulong(0), None)
