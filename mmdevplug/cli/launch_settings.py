"""Read how to start a job from flags and a launch file, checked before anything runs."""

import argparse
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional

import yaml

from mmdevplug.environments.launch import DEFAULT_PORT, shortened
from mmdevplug.environments.loopback import LOOPBACK, is_loopback
from mmdevplug.errors import LaunchError
from mmdevplug.utils.files import write_text

#: What a launch file may set for the job's processes. Nothing that could hold a secret, and not
#: the variables that hide devices, which belong to whoever shares out the host.
ENVIRONMENT = re.compile(
    r'(OMP|MKL)_NUM_THREADS|(GLOO|TP)_SOCKET_IFNAME|TORCH_GLOO_LAZY_INIT|PJRT_DEVICE'
    r'|CPU_NUM_DEVICES|MMDEVPLUG_ACCELERATOR|TORCH_DISTRIBUTED_DEBUG'
    r'|(TORCH_)?NCCL_\w+|[HE]CCL_\w+'
)


class LaunchSettings(NamedTuple):
    """How a job is started; the fields are the keys of a launch file.

    Attributes:
        accelerator (str, optional): As ``--accelerator``.
        nproc (int, optional): Processes on each host.
        nnodes (int): Hosts.
        node_rank (int, optional): Which of them this is, 0 to ``nnodes - 1``.
        master_addr (str, optional): Name or address of host 0.
        master_port (int, optional): Its port. None: a free one of a single host, 29500 on
            several.
        max_restarts (int): How often failed workers are started again.
        timeout (float, optional): Seconds until ranks give up waiting for each other.
        env (Dict[str, str]): Variables for the job's processes.
    """

    accelerator: Optional[str] = None
    nproc: Optional[int] = None
    nnodes: int = 1
    node_rank: Optional[int] = None
    master_addr: Optional[str] = None
    master_port: Optional[int] = None
    max_restarts: int = 0
    timeout: Optional[float] = None
    env: Dict[str, str] = {}


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each key of a launch file but ``accelerator`` and ``env``."""
    group = parser.add_argument_group('starting processes')
    group.add_argument('--nproc', type=int, help='start this many processes on this host')
    group.add_argument('--nnodes', type=int, help='number of hosts that run --nproc processes')
    group.add_argument('--node-rank', type=int, help='which of the hosts this is, from 0')
    group.add_argument('--master-addr', help='name or address of host 0')
    group.add_argument('--master-port', type=int, help='a free port of host 0')
    group.add_argument('--max-restarts', type=int, help='restart failed processes this often')
    group.add_argument(
        '--timeout', type=float, help='seconds until ranks give up waiting for each other'
    )


#: The flags that the job's processes are started without.
LAUNCH_FLAGS = tuple(
    '--' + name.replace('_', '-')
    for name in ('launch', *LaunchSettings._fields)
    if name not in ('accelerator', 'timeout', 'env')
)


def starts_processes(args: argparse.Namespace) -> bool:
    """Whether arguments ask for processes to be started, rather than to be one of them.

    Args:
        args (argparse.Namespace): With the arguments of :func:`add_launch_arguments`.

    Raises:
        LaunchError: If they ask for both.
    """
    flags = [flag for flag in LAUNCH_FLAGS if getattr(args, _name(flag), None) is not None]
    if flags and args.launcher != 'none':
        raise LaunchError(
            f'{flags[0]} and --launcher {args.launcher} disagree: {flags[0]} starts processes, '
            f'--launcher says that they were started. Leave out one of them.'
        )
    return bool(flags)


def _name(flag: str) -> str:
    return flag.lstrip('-').replace('-', '_')


def settings_from(args: argparse.Namespace, path: Optional[str] = None) -> LaunchSettings:
    """Put flags over a launch file and check the whole.

    Args:
        args (argparse.Namespace): With the arguments of :func:`add_launch_arguments`.
        path (str, optional): A launch file. Defaults to None: flags alone.

    Returns:
        LaunchSettings: Complete: on several hosts with the rank of this one.

    Raises:
        LaunchError: If a value is impossible or contradicts another; nothing was started.
    """
    given = {name: getattr(args, name, None) for name in LaunchSettings._fields}
    flags = {name: value for name, value in given.items() if value is not None}
    for key, value in flags.items():
        check_value(key, value, f'--{key.replace("_", "-")}')
    settings = LaunchSettings() if path is None else read_launch_file(path)
    return check_together(_with_node_rank(settings._replace(**flags)), path)


# values --------------------------------------------------------------------------------------


def _is_whole(value: Any, least: int, most: Optional[int] = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value >= least and (most is None or value <= most)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r'[\w.:-]+', value, re.ASCII) is not None


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < float('inf')


class _Rule(NamedTuple):
    holds: Callable[[Any], bool]
    expected: str


_RULES = {
    'accelerator': _Rule(_is_name, "a name such as 'auto', 'cpu' or 'gcu'"),
    'nproc': _Rule(lambda value: _is_whole(value, 1), '1 or more processes on each host'),
    'nnodes': _Rule(lambda value: _is_whole(value, 1), '1 or more hosts'),
    'node_rank': _Rule(lambda value: _is_whole(value, 0), '0 or more'),
    'master_addr': _Rule(_is_name, 'the name or the address of host 0'),
    'master_port': _Rule(lambda value: _is_whole(value, 1, 65535), 'a port from 1 to 65535'),
    'max_restarts': _Rule(lambda value: _is_whole(value, 0, 10000), '0 to 10000'),
    'timeout': _Rule(_is_time, 'a number of seconds above 0'),
    'env': _Rule(lambda value: isinstance(value, dict), 'a mapping of variables to values'),
}


def check_value(key: str, value: Any, origin: str) -> None:
    """Refuse a value that no job could have.

    Args:
        key (str): A key of a launch file.
        value: What was found.
        origin (str): What to call it in the message.

    Raises:
        LaunchError: If the value is impossible.
    """
    if not _RULES[key].holds(value):
        raise LaunchError(
            f'{origin}={shortened(value)}: expected {_RULES[key].expected}. Correct it.'
        )


def check_together(settings: LaunchSettings, origin: Optional[str] = None) -> LaunchSettings:
    """Refuse values that contradict each other.

    Args:
        settings (LaunchSettings): Each value of which is possible.
        origin (str, optional): Where they come from, for messages. Defaults to None.

    Returns:
        LaunchSettings: The same.

    Raises:
        LaunchError: If they contradict each other.
    """
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
        return settings
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
    return settings


def _with_node_rank(settings: LaunchSettings) -> LaunchSettings:
    """Take the rank of this host from Slurm if nobody else says it."""
    found = os.environ.get('SLURM_NODEID')
    if settings.nnodes == 1 or settings.node_rank is not None or found is None:
        return settings
    if re.fullmatch(r'\d+', found, re.ASCII) is None:
        raise LaunchError(f'SLURM_NODEID={found!r}: expected 0 or more. Give --node-rank.')
    return settings._replace(node_rank=int(found))


# files ---------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """YAML's plain types alone, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [str(key) for key in keys if keys.count(key) > 1]
        if twice:
            raise LaunchError(f'{twice[0]} is there twice. Remove one.')
        return super().construct_mapping(node, deep)


def read_launch_file(path: str) -> LaunchSettings:
    """Read a launch file.

    Args:
        path (str): A file of :func:`write_launch_file`, or one written by hand.

    Returns:
        LaunchSettings: Each value is possible; they were not compared with each other.

    Raises:
        LaunchError: If it cannot be read, or a key or a value is not what is expected.
    """
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
        told = ' '.join(str(error).split())[:300]
        raise LaunchError(
            f'--launch {path!r} cannot be read: {told}. Expected a YAML file; write one with '
            f'mmdevplug launch-config.'
        ) from error
    if not isinstance(content, dict) or not content:
        raise LaunchError(
            f'{path}: expected `key: value` lines, found {type(content).__name__}. Write a file '
            f'with mmdevplug launch-config.'
        )
    for key, value in content.items():
        if key not in LaunchSettings._fields:
            raise LaunchError(
                f'{path}: {key!r} is no key of a launch file; expected one of '
                f'{", ".join(LaunchSettings._fields)}. Correct or remove it.'
            )
        check_value(key, value, f'{path}: {key}')
    content['env'] = _check_environment(content.get('env', {}), path)
    return LaunchSettings(**content)


def _check_environment(env: Mapping[Any, Any], path: str) -> Dict[str, str]:
    for name, value in env.items():
        if not isinstance(name, str) or ENVIRONMENT.fullmatch(name) is None:
            raise LaunchError(
                f'{path}: env: {name!r} is not for a launch file; expected names such as '
                f'OMP_NUM_THREADS, GLOO_SOCKET_IFNAME or NCCL_DEBUG. Set it in the shell.'
            )
        plain = isinstance(value, (str, int)) and not isinstance(value, bool)
        if not plain or not str(value).isprintable() or len(str(value)) > 4096:
            raise LaunchError(
                f'{path}: env: {name}={value!r}: expected a word or a whole number. Put other '
                f"values into quotes, e.g. '1'."
            )
    return {name: str(value) for name, value in env.items()}


_TEMPLATE = """\
# Written by `mmdevplug launch-config`. Use it: mmdevplug train CONFIG --launch {name}
# Flags of the same names win: --nproc 2, --node-rank 1, ...

# The family of devices; auto takes what is present.
accelerator: {accelerator}
# Processes on each host. {why}
nproc: {nproc}

# Hosts. Each runs the command above with its own --node-rank{node_rank_note}.
nnodes: {nnodes}
{hosts}
# How often failed processes are started again; they resume from the newest checkpoint.
max_restarts: {max_restarts}
# Seconds until ranks give up waiting for each other.
timeout: {timeout}

# Variables for the processes; those set in the shell win.
env:
  OMP_NUM_THREADS: {threads}
"""


def write_launch_file(path: str, settings: LaunchSettings, why: str, force: bool = False) -> None:
    """Write a launch file with comments.

    Args:
        path (str): The file.
        settings (LaunchSettings): With ``nproc``.
        why (str): A phrase for the comment of ``nproc``.
        force (bool): Whether to replace a file. Defaults to False.

    Raises:
        LaunchError: If the file exists or cannot be written; what was there is still there.
    """
    text = render(settings, Path(path).name, why)
    if os.path.lexists(path) and not force:
        raise LaunchError(f'{path} exists already. Pass --force to replace it, or --out.')
    try:
        write_text(text, path)
    except OSError as error:
        raise LaunchError(f'--out {path!r} cannot be written: {error}. Choose another.') from error


def render(settings: LaunchSettings, name: str, why: str) -> str:
    """The text of a launch file."""
    if settings.nnodes == 1:
        port = settings.master_port
        hosts = [
            f'master_addr: {LOOPBACK}',
            '# master_port: 29500  # a free one is found without it'
            if port is None
            else f'master_port: {port}',
        ]
    else:
        rank = settings.node_rank
        hosts = ['# node_rank: 0'] if rank is None else [f'node_rank: {rank}']
        hosts += [
            f'master_addr: {settings.master_addr}',
            f'master_port: {settings.master_port or DEFAULT_PORT}',
        ]
    return _TEMPLATE.format(
        name=name,
        why=why,
        accelerator=settings.accelerator or 'auto',
        nproc=settings.nproc,
        nnodes=settings.nnodes,
        node_rank_note=' (srun says it by SLURM_NODEID)' if 'SLURM_JOB_ID' in os.environ else '',
        hosts='\n'.join(hosts),
        max_restarts=settings.max_restarts,
        timeout=1800 if settings.timeout is None else settings.timeout,
        threads=settings.env.get('OMP_NUM_THREADS', 1),
    )
