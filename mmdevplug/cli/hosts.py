"""Read how to start a job from flags and variables, checked before anything runs."""

import argparse
import re
from typing import Callable, Dict, Mapping, Optional, Sequence, Union

from mmdevplug.config.fields import options_of
from mmdevplug.config.launch_options import LaunchOptions
from mmdevplug.environments.launch_variables import (
    find_environment,
    refuse_to_run_alone,
    refuse_to_stay_alone,
)
from mmdevplug.environments.starting import read_settings
from mmdevplug.errors import LaunchError

from . import say

#: The flags that the job's processes are started without.
LAUNCH_FLAGS = tuple(
    '--' + name.replace('_', '-') for name in LaunchOptions.names() if name != 'timeout'
)


def add_launch_arguments(
    parser: argparse.ArgumentParser, names: Sequence[str] = tuple(LaunchOptions.names())
) -> None:
    """Add a flag for each of some options of :class:`LaunchOptions`; by default for all."""
    group = parser.add_argument_group('starting processes')
    kinds: Dict[str, Callable[[str], object]] = {
        'int': int,
        'float': float,
        'str': str,
        'int, str': _number_or_word,
    }
    for one in options_of(LaunchOptions):
        if one.name in names:
            group.add_argument(
                '--' + one.name.replace('_', '-'),
                type=kinds[one.metadata['accepts'].replace('None, ', '')],
                help=one.metadata['meaning'].replace('`', ''),
            )


def _number_or_word(text: str) -> Union[int, str]:
    return int(text) if re.fullmatch('-?[0-9]{1,9}', text) else text


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
        refuse_to_stay_alone(starts=False, environ=environ)
        refuse_to_run_alone(environ)
        return False
    env = environment.read()
    # torchrun counts its restarts for a single process, too.
    if env.world_size > 1 or environment.name == 'pytorch':
        args.launcher = environment.name
        if env.rank == 0:
            place = f'{env.world_size}, which meet at {env.master_addr}:{env.master_port}'
            say(environment.found(f'rank 0 of {place}'))
    else:  # an only task, in a shell with the variables of a rank of several
        refuse_to_run_alone(environ)
    return False


def read_job(
    args: argparse.Namespace, environ: Optional[Mapping[str, str]] = None
) -> LaunchOptions:
    """Read how to start a job from flags and variables, checked before anything runs."""
    given = {name: getattr(args, name, None) for name in LaunchOptions.names()}
    given = {name: value for name, value in given.items() if value is not None}
    return read_settings(given, say, environ)
