"""How a job is to be started, by what flags and variables say, and whether it can be."""

import json
import os
import runpy
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from mmdevplug.config.launch_options import ELASTIC_RESTARTS, LaunchOptions
from mmdevplug.errors import LaunchError
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.host import available_memory, usable_cores

from .base import DEFAULT_PORT, Environment
from .launch_variables import find_environment, refuse_to_stay_alone
from .loopback import LOOPBACK, is_loopback

Say = Callable[[str], None]
#: What names the hosts of a job and which of them this is.
_NUMBERED = ('nnodes', 'node_rank', 'master_addr')
#: What a process holds that has imported PyTorch and MMEngine and has no model yet: 154 MB of its
#: own, with PyTorch 2.13 for the CPU.
LEAST_BYTES_PER_RANK = 150 << 20
#: What MMEngine imports if it is installed, before anybody asks for it.
_VENDORS = ('torch_npu', 'torch_mlu', 'torch_dipu', 'torch_musa')


def read_settings(
    given: Dict[str, object], say: Say, environ: Optional[Mapping[str, str]] = None
) -> LaunchOptions:
    """Lay flags over what the variables say, and check the result.

    Args:
        given (dict): Options that flags give.
        say (Callable): Gets a line about what the variables say, if they are used.
        environ (Mapping, optional): Defaults to ``os.environ``.
    """
    for name, value in given.items():
        LaunchOptions.check(name, value, f'--{name.replace("_", "-")}')
    environment = find_environment(environ)
    found = _read_hosts(environment, given, environ)
    for name, value in found.items():
        LaunchOptions.check(name, value, f'{environment.describe_variables()}: {name}')
    settings = LaunchOptions(**{**found, **given})
    check_together(settings, by_hand='master_addr' not in found)
    if found:
        place = f'host {settings.node_rank or 0} of {settings.nnodes}'
        if settings.elastic:
            place = f'one of {settings.nnodes} hosts'
        place += f', {settings.nproc} process(es) on each'
        if settings.several_hosts:
            place += f', which meet at {settings.master_addr}:{settings.master_port}'
        say(environment.found(place))
    return settings


def _read_hosts(
    environment: Environment, given: Dict[str, Any], environ: Optional[Mapping[str, str]]
) -> Dict[str, Any]:
    """What the variables say of the hosts of the job, where the flags do not.

    Raises:
        LaunchError: If the two contradict each other.
    """
    elastic = LaunchOptions(**given).elastic
    if all(given.get(key) is not None for key in (_NUMBERED[::2] if elastic else _NUMBERED)):
        if environment.name != 'none' and not environment.per_host:
            environment.refuse_several_starters()
        return {}
    if environment.name == 'none':
        if 'nnodes' not in given:
            refuse_to_stay_alone(starts=True, environ=environ)
        several = given.get('nnodes', 1) != 1 and not elastic
        # Of a shell that `srun --pty` has started, for example.
        host = environment.number('SLURM_NODEID', default=None) if several else None
        return {} if host is None or 'node_rank' in given else dict(node_rank=host)
    hosts = environment.hosts()
    for key in ('nnodes', 'node_rank'):
        mine, found = given.get(key), getattr(hosts, key)
        if None not in (mine, found) and mine != found:
            raise LaunchError(
                f'{key}={mine} and {environment.describe_variables()} disagree: these say '
                f'{key}={found}. Leave out {key}, or give all of --nnodes, --node-rank and '
                f'--master-addr; if the variables are left over, for a job of this host alone: '
                f'unset {" ".join(environment.detect())}'
            )
    if hosts.nnodes == 1 and not environment.per_host:
        return {}
    found = {key: value for key, value in hosts._asdict().items() if value is not None}
    if environment.per_host:
        found.setdefault('nproc', 1)
    return found


def check_together(settings: LaunchOptions, by_hand: bool = True) -> None:
    """Refuse values that contradict each other; a launcher's address is taken as it is."""
    nnodes, node_rank = settings.nnodes, settings.node_rank
    if settings.nproc is None:
        raise LaunchError(
            'nproc (--nproc) is not given, but processes are to be started. Give the number of '
            'processes on each host, e.g. --nproc 1.'
        )
    unreachable = by_hand and is_loopback(settings.master_addr or 'localhost')
    if settings.several_hosts and unreachable:
        raise LaunchError(
            f'master_addr={settings.master_addr!r} and nnodes={nnodes} disagree: expected a name '
            f'or an address of host 0 that the other hosts reach. Give --master-addr.'
        )
    if settings.elastic and node_rank is not None:
        raise LaunchError(
            f'node_rank={node_rank} and nnodes={nnodes} disagree: hosts that join and leave are '
            f'numbered as they come. Leave out the node rank.'
        )
    least = None if settings.elastic else int(nnodes)
    if least is not None and (node_rank or 0) >= least:
        raise LaunchError(
            f'node_rank={node_rank} and nnodes={nnodes} disagree: expected 0 to {least - 1}, '
            f'another on each host. Correct --nnodes or --node-rank.'
        )
    if least is not None and least > 1 and node_rank is None:
        raise LaunchError(
            f'node_rank is not given, but nnodes={nnodes}: expected 0 to {least - 1}, another on '
            f'each host. Give --node-rank; under srun SLURM_NODEID says it.'
        )


def torchrun_options(settings: LaunchOptions) -> List[str]:
    """The options with which torchrun starts a job, up to the script."""
    restarts = settings.max_restarts
    if restarts is None:
        restarts = ELASTIC_RESTARTS if settings.elastic else 0
    options = [
        # torchrun would take --nproc for an abbreviation of its own options.
        f'--nproc_per_node={settings.nproc}',
        f'--nnodes={settings.nnodes}',
        f'--max_restarts={restarts}',
    ]
    address, port = settings.master_addr, settings.master_port or DEFAULT_PORT
    seconds = None if settings.timeout is None else max(1, round(settings.timeout))
    if settings.elastic:
        options += ['--rdzv_backend=c10d', f'--rdzv_endpoint={address}:{port}']
        return options if seconds is None else [*options, f'--rdzv_conf=join_timeout={seconds}']
    if settings.several_hosts and seconds is not None:
        options.append(f'--rdzv_conf=timeout={seconds}')
    return [
        *options,
        '--rdzv_backend=static',
        f'--node_rank={settings.node_rank or 0}',
        f'--master_addr={address if settings.several_hosts else LOOPBACK}',
        f'--master_port={port}',
    ]


def accelerate_config(settings: LaunchOptions, use_cpu: bool) -> str:
    """Return the text of a file for ``accelerate launch --config_file``.

    Args:
        settings (LaunchOptions): How the job is started, with numbers for ``nproc`` and
            ``nnodes``.
        use_cpu (bool): Whether the job trains on the CPU.
    """
    values = dict(
        # On any device: accelerate starts processes as torchrun does. It starts a single process
        # with MULTI_CPU, and a function with XLA; both lack torchrun's variables.
        distributed_type='MULTI_GPU',
        use_cpu=use_cpu,
        num_processes=int(settings.nproc or 1) * int(settings.nnodes or 1),
        num_machines=settings.nnodes,
        machine_rank=settings.node_rank or 0,
        main_process_ip=settings.master_addr,
        main_process_port=settings.master_port,
    )
    # YAML reads JSON's values; a name such as `1e3` stays a name in quotes.
    return ''.join(f'{key}: {json.dumps(value)}\n' for key, value in values.items())


def without_options(argv: List[str], options: Sequence[str]) -> List[str]:
    """Remove ``option VALUE`` and ``option=VALUE`` for each of some options."""
    kept: List[str] = []
    words = iter(argv)
    for word in words:
        if word in options:
            next(words, None)
        elif word.split('=')[0] not in options:
            kept.append(word)
    return kept


def check_room(wanted: int, say: Say) -> None:
    """Refuse more processes than memory holds, and warn of more than there are cores."""
    memory = available_memory()
    most = memory.available // LEAST_BYTES_PER_RANK
    if wanted > most:
        raise LaunchError(
            f'--nproc={wanted}, but the memory that is available ({memory}) '
            f'holds at most {most} processes of {format_bytes(LEAST_BYTES_PER_RANK)} '
            f'each, which PyTorch alone takes. Start fewer, or insist with --oversubscribe.'
        )
    cores = usable_cores()
    if wanted > cores:
        say(
            f'--nproc={wanted}, but this process may use {cores} core(s): processes will wait '
            f'for each other. Start {cores} or fewer; --oversubscribe silences this.'
        )


def why_not_forked() -> Optional[str]:
    """Why a process that has imported PyTorch and MMEngine must not be forked; None if it may."""
    if sys.platform != 'linux':
        return f'the system is {sys.platform}'
    names = [name for name in _VENDORS if find_spec(name) is not None]
    if os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD', '1') == '1':
        found: Any = entry_points()
        if isinstance(found, dict):  # before Python 3.12
            names += [one.name for one in found.get('torch.backends', ())]
        else:
            names += [one.name for one in found.select(group='torch.backends')]
    if names:
        return f'PyTorch or MMEngine imports {names[0]}, which may take a device or start threads'
    package = find_spec('torch')
    assert package is not None
    build = runpy.run_path(str(Path(str(package.origin)).with_name('version.py')))
    # PyTorch 1 and PyTorch for ROCm count devices by taking them; without a driver there are none.
    takes = build.get('hip') or (build.get('cuda') and build['__version__'].startswith('1.'))
    if takes and any(os.path.exists(f'/dev/{name}') for name in ('nvidiactl', 'dxg', 'kfd')):
        return f'PyTorch {build["__version__"]} takes devices when MMEngine counts them'
    return None
