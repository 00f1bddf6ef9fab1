"""Let torchrun's agents meet, also where hosts join and leave (``--nnodes MIN:MAX``).

torchrun leaves open what the ranks of an elastic job need to know: how many there are when all
hosts have joined, and whether training has begun already.
"""

import os
import socket
import time
from argparse import Namespace
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Dict, Iterator, Optional, Tuple

import psutil
from torch import distributed as torch_dist
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from mmdevplug.config.launch_options import read_range
from mmdevplug.environments.launch_variables import DEFAULT_PORT
from mmdevplug.environments.torchrun import MOST_RANKS, ROUND
from mmdevplug.errors import LaunchError, first_line
from mmdevplug.utils.patching import LocalPatch

from . import say

#: How long an agent waits for an answer of the store; PyTorch's own is 60 s.
_READ_SECONDS = 15
#: How long hosts wait for each other, as torchrun's own.
_WAIT_SECONDS = 900.0
#: The name of :class:`ElasticRendezvous` for torchrun.
_BACKEND = 'mmdevplug'
#: What torchrun raises where they do not meet; PyTorch before 2.0 has no class for it.
_MEETING_ERRORS = (RendezvousError, getattr(torch_dist, 'DistError', RuntimeError))

#: Nobody waits longer than a minute without a line.
_LINE_SECONDS = 50.0

_rendezvous = LocalPatch(api.SimpleElasticAgent, '_rendezvous')
_get_fq_hostname = LocalPatch(api, '_get_fq_hostname')


def rendezvous_options(args: Namespace) -> Dict[str, str]:
    """Split ``--rdzv_conf``."""
    words = (word.partition('=')[::2] for word in str(args.rdzv_conf).split(',') if word)
    return dict(words)


def meeting_timeout(args: Namespace) -> float:
    """How long hosts wait for each other, in seconds."""
    words = rendezvous_options(args)
    return float(words.get('timeout', words.get('join_timeout', _WAIT_SECONDS)))


def meeting_point(args: Namespace) -> Optional[Tuple[str, int]]:
    """Return the name and the port where the hosts of a job meet; None on a single host."""
    if args.rdzv_endpoint:
        if args.rdzv_backend != 'c10d':
            return None  # of another kind of store, such as etcd
        host, _, port = args.rdzv_endpoint.rpartition(':')
        if not port.isdecimal():
            host, port = args.rdzv_endpoint, str(DEFAULT_PORT)
        return host.strip('[]'), int(port)
    if args.rdzv_backend != 'static' or str(args.nnodes) in ('1', '1:1'):
        return None
    return args.master_addr, DEFAULT_PORT if args.master_port is None else args.master_port


@contextmanager
def elastic(args: Namespace) -> Iterator[None]:
    """Run torchrun so that hosts may join and leave, if its arguments say so."""
    hosts = read_range(str(args.nnodes))
    place = meeting_point(args)
    if hosts is None and place is not None and args.rdzv_backend == 'static':
        store = store_of_hosts(args, place)
        yield
        del store  # torchrun used it: PyTorch has one store for each port
        return
    if hosts is None or args.rdzv_backend != 'c10d' or place is None:
        yield
        return
    address = _own_address(place)
    if str(args.nproc_per_node).isdecimal():
        os.environ[MOST_RANKS] = str(hosts[1] * int(args.nproc_per_node))
    # The host that is gone is asked several times before an agent gives up.
    defaults = dict(read_timeout=_READ_SECONDS)
    if _is_here(place[0], address):
        defaults['is_host'] = _is_free(place)  # PyTorch compares names alone.
    words = dict(defaults, **rendezvous_options(args))
    args.rdzv_conf = ','.join(f'{name}={value}' for name, value in words.items())
    args.rdzv_backend = _BACKEND
    with ExitStack() as patched:
        patched.enter_context(_rendezvous(_count_hosts))
        if not hasattr(args, 'local_addr'):  # PyTorch before 2.0
            patched.enter_context(_get_fq_hostname(lambda _: address))
        elif args.local_addr is None:
            # A name that the other hosts may not know, otherwise.
            args.local_addr = address
        try:
            yield
        finally:
            for name in (MOST_RANKS, ROUND):
                os.environ.pop(name, None)


def store_of_hosts(args: Namespace, place: Tuple[str, int]) -> Any:
    """Connect to the store of host 0, and name the hosts that are missing, not only their number.

    Args:
        args (Namespace): torchrun's arguments, with a number of hosts that is fixed.
        place (tuple): Where the hosts meet.

    Returns:
        Store: On host 0 the store that torchrun takes, while it is kept.

    Raises:
        LaunchError: If they do not come in time.
    """
    rank, hosts = args.node_rank, int(str(args.nnodes).split(':')[-1])
    limit, (address, port) = meeting_timeout(args), place
    began = reported = time.monotonic()
    store: Any = None
    while store is None:
        wait = max(1.0, min(_LINE_SECONDS, began + limit - time.monotonic()))
        options: Any = dict(timeout=timedelta(seconds=wait), multi_tenant=rank == 0)
        try:
            store = torch_dist.TCPStore(
                address, port, hosts, rank == 0, wait_for_workers=False, **options
            )
        except RuntimeError:
            waited = time.monotonic() - began
            if rank == 0 or waited >= limit:
                raise
            say(
                f'host {rank} of {hosts} has waited {waited:.0f} s for host 0 at {address}:{port}.'
            )
    store.set_timeout(timedelta(seconds=limit))
    missing, ended = list(range(hosts)), False
    while missing:
        try:
            store.add(f'mmdevplug/hosts/{rank}', 1)
            missing = [host for host in missing if not store.add(f'mmdevplug/hosts/{host}', 0)]
        except RuntimeError:
            ended = True  # host 0, because others were missing
        now = time.monotonic()
        text = f'{now - began:.0f} s for host(s) {", ".join(map(str, missing))} of {hosts}'
        if missing and (ended or now - began >= limit):
            raise LaunchError(
                f'host {rank} has waited {text} at {address}:{port}. Expected all of them to be '
                f'started with this address and another --node-rank each. Look at what the '
                f'missing ones print, and at a firewall; a slow start needs a longer --timeout.'
            )
        if missing and now - reported >= _LINE_SECONDS:
            reported = now
            say(f'host {rank} has waited {text}.')
        time.sleep(0.2 if missing else 0)
    return store


class ElasticRendezvous:
    """torchrun's ``c10d`` rendezvous, which tells the ranks of each round which one it is."""

    def __init__(self, params: Any) -> None:
        backend, store = create_backend(params)
        self._handler = create_handler(store, backend, params)
        self._port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def get_backend(self) -> str:
        """Return the name by which torchrun creates it."""
        return _BACKEND

    def next_rendezvous(self) -> Any:
        """Join the next round."""
        # PyTorch keeps the place where the ranks of an earlier round met; rank 0 may have moved.
        self._handler._bootstrap_store_info = None
        found = self._handler.next_rendezvous()
        os.environ[ROUND] = str(self._handler._state_holder.state.round)
        _limit_silence(self._port)
        return found


rendezvous_handler_registry.register(_BACKEND, ElasticRendezvous)


def _limit_silence(port: int) -> None:
    """Let connections to the store end if its host is lost, for which PyTorch waits for ever."""
    if not hasattr(socket, 'TCP_USER_TIMEOUT'):  # not Linux
        return
    own = psutil.Process()
    connections = getattr(own, 'net_connections', None) or own.connections  # psutil before 6
    for found in connections('tcp'):
        if found.raddr and found.raddr.port == port:
            with socket.socket(fileno=os.dup(found.fd)) as store:
                milliseconds = 1000 * _READ_SECONDS
                store.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _count_hosts(rendezvous: Any, agent: Any, group: Any) -> None:
    """Join, and do not count a restart that hosts have caused which came or went."""
    before = group.group_world_size
    rendezvous(agent, group)
    now = group.group_world_size
    most = group.spec.max_restarts
    changed = f', {before} before' if before not in (None, now) else ''
    if changed and agent._remaining_restarts < most:
        agent._remaining_restarts += 1
    say(
        f'round {os.environ[ROUND]}: this is host {group.group_rank} of {now}{changed}; '
        f'{agent._remaining_restarts} of {most} restarts are left.'
    )


def _own_address(place: Tuple[str, int]) -> str:
    """Return the address of this host by which the others of its network reach it."""
    family, kind, *_, target = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(target)  # sends nothing
        except OSError as error:
            raise LaunchError(
                f'no way from this host to {place[0]}:{place[1]}, where the hosts of this job '
                f'meet: {error}. Expected an address that all of them reach. Correct '
                f'--master-addr, or the network.'
            ) from error
        return probe.getsockname()[0]


def _is_here(name: str, address: str) -> bool:
    return any(found[4][0] == address for found in socket.getaddrinfo(name, None))


def _is_free(place: Tuple[str, int]) -> int:
    """Return 1 if this host can open the port, 0 if something else holds it already."""
    family, kind, *_, target = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError:
            return 0
    return 1


@contextmanager
def explain_meeting(args: Namespace) -> Iterator[None]:
    """Say in one message that the hosts of a job did not meet."""
    try:
        yield
    except _MEETING_ERRORS as error:
        place = args.rdzv_endpoint or f'{args.master_addr}:{args.master_port}'
        why = first_line(error).rstrip('. ')
        if read_range(str(args.nnodes)) is None:
            raise LaunchError(
                f'host {args.node_rank} of {args.nnodes} cannot meet the others at {place}: '
                f'{why}. Expected all of them to be started with the same address and another '
                f'node rank each. Check that host 0 runs there, and that the port is free and not '
                f'behind a firewall.'
            ) from error
        if isinstance(error, RendezvousClosedError):
            raise LaunchError(
                f'the job at {place} has ended, and takes no more hosts. Start it again on all '
                f'hosts, with --resume to go on from its last checkpoint.'
            ) from error
        raise LaunchError(
            f'this host cannot meet the others at {place}: {why}. Expected --nnodes '
            f'{args.nnodes} hosts to reach that address for as long as the job runs. If its host '
            f'is lost, start the job again with --resume; `mmdevplug rendezvous` on a host that '
            f'stays lets any host of the job leave.'
        ) from error
