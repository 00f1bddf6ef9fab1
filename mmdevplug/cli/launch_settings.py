"""Read how to start a job from flags and a launch file, checked before anything runs."""

import argparse
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Optional

import yaml

from mmdevplug.config.fields import options_of, refuse_unknown
from mmdevplug.config.launch import LaunchOptions, read_variables
from mmdevplug.environments.loopback import is_loopback
from mmdevplug.errors import LaunchError

#: The flags that the job's processes are started without.
LAUNCH_FLAGS = tuple(
    '--' + name.replace('_', '-')
    for name in ('launch', *LaunchOptions.names())
    if name not in ('accelerator', 'timeout', 'env')
)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each key of a launch file but ``accelerator`` and ``env``."""
    group = parser.add_argument_group('starting processes')
    kinds = dict(int=int, float=float, str=str)
    for one in options_of(LaunchOptions):
        if one.name not in ('accelerator', 'env'):
            group.add_argument(
                '--' + one.name.replace('_', '-'),
                type=kinds[one.metadata['accepts']],
                help=one.metadata['meaning'].replace('`', ''),
            )


def flags_of(args: argparse.Namespace) -> Dict[str, Any]:
    """Return the launch options that flags give, each of which is possible."""
    given = {name: getattr(args, name, None) for name in LaunchOptions.names()}
    flags = {name: value for name, value in given.items() if value is not None}
    for name, value in flags.items():
        LaunchOptions.check(name, value, f'--{name.replace("_", "-")}')
    return flags


def starts_processes(args: argparse.Namespace) -> bool:
    """Whether arguments start processes; refuse those that also say that they were started."""
    flags = [one for one in LAUNCH_FLAGS if getattr(args, one[2:].replace('-', '_')) is not None]
    if flags and args.launcher != 'none':
        raise LaunchError(
            f'{flags[0]} and --launcher {args.launcher} disagree: {flags[0]} starts processes, '
            f'--launcher says that they were started. Leave out one of them.'
        )
    return bool(flags)


def read_settings(args: argparse.Namespace, path: Optional[str] = None) -> LaunchOptions:
    """Lay flags over a launch file, if there is one, and check the result."""
    flags = flags_of(args)
    settings = replace(LaunchOptions() if path is None else read_launch_file(path), **flags)
    found = os.environ.get('SLURM_NODEID')
    if settings.nnodes > 1 and settings.node_rank is None and found is not None:
        if re.fullmatch(r'\d+', found, re.ASCII) is None:
            raise LaunchError(f'SLURM_NODEID={found!r}: expected 0 or more. Give --node-rank.')
        settings = replace(settings, node_rank=int(found))
    check_together(settings, path)
    return settings


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


class _StrictLoader(yaml.SafeLoader):
    """YAML's plain types alone, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [str(key) for key in keys if keys.count(key) > 1]
        if twice:
            raise LaunchError(f'{twice[0]} is there twice. Remove one.')
        return super().construct_mapping(node, deep)


def read_launch_file(path: str) -> LaunchOptions:
    """Read a launch file and check each value of it."""
    if not Path(path).is_file():
        raise LaunchError(
            f'--launch {path!r} is no file. Write one with mmdevplug launch-config --out {path}.'
        )
    try:
        with open(path, encoding='utf-8') as file:
            content = yaml.load(file, Loader=_StrictLoader)
    except LaunchError as error:
        raise LaunchError(f'{path}: {error}') from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        reason = ' '.join(str(error).split())[:300]
        raise LaunchError(
            f'--launch {path!r} cannot be read: {reason}. Expected a YAML file; write one with '
            f'mmdevplug launch-config.'
        ) from error
    if not isinstance(content, dict) or not content:
        raise LaunchError(
            f'{path}: expected `key: value` lines, found {type(content).__name__}. Write a file '
            f'with mmdevplug launch-config.'
        )
    refuse_unknown(content, LaunchOptions.names(), f'launch file {path}', LaunchError)
    for key, value in content.items():
        LaunchOptions.check(key, value, f'{path}: {key}')
    env = read_variables(content.get('env', {}), f'{path}: env')
    return LaunchOptions(**dict(content, env=env))
