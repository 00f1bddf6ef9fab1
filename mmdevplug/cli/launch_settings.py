"""Read how to start a job from flags and variables, checked before anything runs."""

import argparse
import os
import re
from dataclasses import replace
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from mmdevplug.config.fields import options_of
from mmdevplug.config.launch_options import LaunchOptions
from mmdevplug.environments.launch_variables import (
    DEFAULT_PORT,
    ENVIRONMENTS,
    Environment,
    find_environment,
    refuse_to_run_alone,
)
from mmdevplug.environments.loopback import is_loopback
from mmdevplug.errors import LaunchError

from . import say

#: What names the hosts of a job and which of them this is.
_NUMBERED = ('nnodes', 'node_rank', 'master_addr')
#: The flags that the job's processes are started without.
LAUNCH_FLAGS = tuple(
    '--' + name.replace('_', '-') for name in LaunchOptions.names() if name != 'timeout'
)


def add_launch_arguments(
    parser: argparse.ArgumentParser, names: Sequence[str] = tuple(LaunchOptions.names())
) -> None:
    """Add a flag for each of some options of :class:`LaunchOptions`; by default for all."""
    group = parser.add_argument_group('starting processes')
    kinds = {'int': int, 'float': float, 'str': str, 'int, str': _number_or_word}
    for one in options_of(LaunchOptions):
        if one.name in names:
            group.add_argument(
                '--' + one.name.replace('_', '-'),
                type=kinds[one.metadata['accepts']],
                help=one.metadata['meaning'].replace('`', ''),
            )


def _number_or_word(text: str) -> Any:
    return int(text) if re.fullmatch('-?[0-9]{1,9}', text) else text


def flags_of(args: argparse.Namespace) -> Dict[str, Any]:
    """Return the launch options that flags give, each of which is possible."""
    given = {name: getattr(args, name, None) for name in LaunchOptions.names()}
    flags = {name: value for name, value in given.items() if value is not None}
    for name, value in flags.items():
        LaunchOptions.check(name, value, f'--{name.replace("_", "-")}')
    return flags


class Start(NamedTuple):
    """How to start the processes of this host."""

    settings: LaunchOptions
    rendezvous: Tuple[str, ...] = ()  # torchrun's options, where hosts may join and leave
    used: Tuple[str, ...] = ()  # the variables that say so


def starts_processes(
    args: argparse.Namespace, environ: Optional[Mapping[str, str]] = None
) -> bool:
    """Whether this process is to start others; if not, ``args.launcher`` names what started it.

    Without ``--launcher`` the variables decide, and a line says which.
    """
    flags = [one for one in LAUNCH_FLAGS if getattr(args, one[2:].replace('-', '_')) is not None]
    if flags and args.launcher not in (None, 'none'):
        raise LaunchError(
            f'{flags[0]} and --launcher {args.launcher} disagree: {flags[0]} starts processes, '
            f'--launcher says that they were started. Leave out one of them.'
        )
    if flags or args.launcher is not None:
        args.launcher = args.launcher or 'none'
        return bool(flags)
    args.launcher = 'none'
    environment = find_environment(environ)
    if environment.per_host:
        hosts = environment.hosts()
        return hosts.nnodes != 1 or hosts.nproc not in (None, 1)
    if environment.name == 'none':
        _refuse_to_stay_alone(environ, starts=False)
        refuse_to_run_alone(environ)
        return False
    env = environment.read()
    # torchrun counts its restarts for a single process, too.
    if env.world_size > 1 or environment.name == 'pytorch':
        args.launcher = environment.name
        if env.rank == 0:
            _say_found(
                environment,
                f'rank 0 of {env.world_size}, which meet at {env.master_addr}:{env.master_port}',
            )
    return False


def _refuse_to_stay_alone(environ: Optional[Mapping[str, str]], starts: bool) -> None:
    for kind in ENVIRONMENTS:
        kind(environ).refuse_to_stay_alone(starts)


def _say_found(environment: Environment, place: str) -> None:
    say(f'launcher {environment.name!r}, found by {environment.describe_variables()}: {place}.')


def read_settings(args: argparse.Namespace, environ: Optional[Mapping[str, str]] = None) -> Start:
    """Lay flags over what the variables say, and check the result."""
    environ = os.environ if environ is None else environ
    start = fill_in_hosts(flags_of(args), environ)
    settings = start.settings
    found = environ.get('SLURM_NODEID')
    numbered = settings.several_hosts and not settings.elastic
    if numbered and settings.node_rank is None and found is not None:
        if re.fullmatch(r'\d+', found, re.ASCII) is None:
            raise LaunchError(f'SLURM_NODEID={found!r}: expected 0 or more. Give --node-rank.')
        settings = replace(settings, node_rank=int(found))
    if not start.used:
        check_together(settings)
        start = start._replace(rendezvous=rendezvous_of(settings))
    return start._replace(settings=settings)


def rendezvous_of(settings: LaunchOptions) -> Tuple[str, ...]:
    """The options of torchrun with which the hosts of an elastic job find each other."""
    if not settings.elastic:
        return ()
    options = (
        f'--nnodes={settings.nnodes}',
        '--rdzv_backend=c10d',
        f'--rdzv_endpoint={settings.master_addr}:{settings.master_port or DEFAULT_PORT}',
        '--rdzv_id=mmdevplug',
    )
    if settings.timeout is None:
        return options
    return (*options, f'--rdzv_conf=join_timeout={max(1, round(settings.timeout))}')


def fill_in_hosts(given: Mapping[str, Any], environ: Mapping[str, str]) -> Start:
    """Fill in the hosts of the job, as the variables tell of them, where they are not given.

    Raises:
        LaunchError: If the two contradict each other.
    """
    alone = Start(LaunchOptions(**given))
    named = ('nnodes', 'master_addr') if alone.settings.elastic else _NUMBERED
    environment = find_environment(environ)
    if all(given.get(key) is not None for key in named):
        if environment.name != 'none' and not environment.per_host:
            environment.refuse_several_starters()
        return alone
    hosts = environment.hosts()
    for key in ('nnodes', 'node_rank'):
        mine, found = given.get(key), getattr(hosts, key)
        if environment.name != 'none' and None not in (mine, found) and mine != found:
            raise LaunchError(
                f'{key}={mine} and {environment.describe_variables()} disagree: these say '
                f'{key}={found}. Leave out {key}, or give all of --nnodes, --node-rank and '
                f'--master-addr; if the variables are left over, for a job of this host alone: '
                f'unset {" ".join(environment.detect())}'
            )
    if environment.name == 'none' and 'nnodes' not in given:
        _refuse_to_stay_alone(environ, starts=True)
    several = hosts.nnodes != 1
    if not several and not environment.per_host:
        return alone
    found = {
        key: getattr(hosts, key)
        for key in ('nproc', 'master_addr', 'master_port', 'max_restarts')
        if getattr(hosts, key) is not None
    }
    if environment.per_host:
        found.setdefault('nproc', 1)
    if several and not hosts.rendezvous:
        found.update(nnodes=hosts.nnodes, node_rank=hosts.node_rank)
    for key, value in found.items():
        LaunchOptions.check(key, value, f'{environment.describe_variables()}: {key}')
    settings = LaunchOptions(**{**found, **given})
    if settings.nproc is None:
        check_together(settings)
    place = f'host {hosts.node_rank} of {hosts.nnodes}' if several else 'the only host'
    if hosts.rendezvous:
        place = f'one of {hosts.nnodes} hosts'
    place += f', {settings.nproc} process(es) on each'
    if several:
        endpoint = [one for one in hosts.rendezvous if one.startswith('--rdzv_endpoint=')]
        port = settings.master_port
        place += f', which meet at {endpoint[0][16:] if endpoint else settings.master_addr}'
        place += '' if endpoint else f':{port}'
    _say_found(environment, place)
    rendezvous = hosts.rendezvous and (f'--nnodes={hosts.nnodes}', *hosts.rendezvous)
    return Start(settings, rendezvous, tuple(environment.detect()))


def check_together(settings: LaunchOptions, origin: Optional[str] = None) -> None:
    """Refuse values that contradict each other; messages name where they come from."""
    where = '' if origin is None else f'{origin}: '
    if settings.nproc is None:
        raise LaunchError(
            f'{where}nproc (--nproc) is not given, but processes are to be started. Give the '
            f'number of processes on each host, e.g. --nproc 1.'
        )
    if settings.nnodes == 1:
        if settings.node_rank:
            raise LaunchError(
                f'{where}node_rank={settings.node_rank} and nnodes=1 disagree: expected '
                f'node_rank=0. Give --nnodes, or leave out the node rank.'
            )
        return
    if settings.master_addr is None or is_loopback(settings.master_addr):
        raise LaunchError(
            f'{where}master_addr={settings.master_addr!r} and nnodes={settings.nnodes} disagree: '
            f'expected a name or an address of host 0 that the other hosts reach. Give '
            f'--master-addr.'
        )
    if settings.elastic:
        if settings.node_rank is not None:
            raise LaunchError(
                f'{where}node_rank={settings.node_rank} and nnodes={settings.nnodes} disagree: '
                f'hosts that join and leave are numbered as they come. Leave out the node rank.'
            )
        return
    if settings.node_rank is None:
        raise LaunchError(
            f'{where}node_rank is not given, but nnodes={settings.nnodes}: expected 0 to '
            f'{settings.nnodes - 1}, another on each host. Give --node-rank; under srun '
            f'SLURM_NODEID says it.'
        )
    if settings.node_rank >= settings.nnodes:
        raise LaunchError(
            f'{where}node_rank={settings.node_rank} and nnodes={settings.nnodes} disagree: '
            f'expected 0 to {settings.nnodes - 1}. Correct one of them.'
        )
