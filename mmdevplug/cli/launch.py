"""Start the processes of a job, after counting the devices of this host."""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence

from mmengine.config import Config

from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.launch_options import COUNTED, ELASTIC_RESTARTS, LaunchOptions
from mmdevplug.environments.launch_variables import DEFAULT_PORT
from mmdevplug.environments.loopback import LOOPBACK
from mmdevplug.environments.stale import stale_variables
from mmdevplug.errors import DevPlugError, LaunchError
from mmdevplug.registry import ACCELERATORS
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.host import available_memory, usable_cores

from . import say
from .arguments import Parser
from .common import add_common_arguments, load_config, run
from .forward_signals import end_children_on_signals
from .launch_settings import (
    LAUNCH_FLAGS,
    Start,
    check_together,
    fill_in_hosts,
    read_settings,
    rendezvous_of,
)
from .rank_server import RankServer, preload

if TYPE_CHECKING:  # it imports PyTorch, which the process that starts others does without
    from mmdevplug.accelerators import Accelerator

#: What a process holds that has imported PyTorch and MMEngine and has no model yet: 154 MB of its
#: own, with PyTorch 2.13 for the CPU.
LEAST_BYTES_PER_RANK = 150 << 20
#: Where a number of processes comes from that nothing named: one in each pod.
DEFAULT_COUNT = 'nproc'


def refuse_missing_devices(accelerator: 'Accelerator', wanted: int, origin: str) -> None:
    """Refuse more processes than this host has devices, unless processes share them."""
    most = accelerator.max_ranks()
    if not accelerator.shares_devices and wanted > most:
        raise LaunchError(
            f'{origin}={wanted}, but this host has {accelerator.device_count()} '
            f'{accelerator.name} device(s) ({accelerator.describe_visibility()}). Start at most '
            f'{most} processes, or make more devices visible.'
        )


def name_unused_devices(accelerator: 'Accelerator', wanted: int) -> None:
    """Say that a pod, which named no number of processes, has devices for more."""
    most = accelerator.max_ranks()
    if not accelerator.shares_devices and wanted < most:
        say(
            f'{wanted} process(es) in this pod, which has {most} {accelerator.name} devices: '
            f'--nproc auto, or PET_NPROC_PER_NODE={most} in the job, uses all of them.'
        )


def check_room(wanted: int, origin: str, insist: bool = False) -> None:
    """Refuse more processes than memory holds, and warn of more than there are cores."""
    if insist:
        return
    available, whose = available_memory()
    most = available // LEAST_BYTES_PER_RANK
    if wanted > most:
        raise LaunchError(
            f'{origin}={wanted}, but the memory that is available ({format_bytes(available)}, '
            f'{whose}) holds at most {most} processes of {format_bytes(LEAST_BYTES_PER_RANK)} '
            f'each, which PyTorch alone takes. Start fewer, or insist with --oversubscribe.'
        )
    cores = usable_cores()
    if wanted > cores:
        say(
            f'{origin}={wanted}, but this process may use {cores} core(s): processes will wait '
            f'for each other. Start {cores} or fewer; --oversubscribe silences this.'
        )


def launch(module: str, argv: List[str], args: argparse.Namespace) -> None:
    """Run a module in several processes until they end; ``args`` are ``argv`` parsed."""
    start = read_settings(args)
    words = without_options(argv, LAUNCH_FLAGS)
    origin = '--nproc'
    if args.nproc is None:
        origin = 'PET_NPROC_PER_NODE' if 'PET_NPROC_PER_NODE' in os.environ else DEFAULT_COUNT
    _check_and_start(origin, words, start, ['-m', module, *words, '--launcher', 'pytorch'])


def _check_and_start(
    origin: str, checked: Sequence[str], start: Start, script: Sequence[str]
) -> None:
    """Check the number of processes with :func:`main`, then start them and wait for their end.

    A word for it, such as ``'auto'``, is counted there.

    Raises:
        SystemExit: If one of them has not ended with status 0.
    """
    _drop_variables(start)
    settings = start.settings
    if settings.nproc != 1:
        # torchrun and MMEngine would do so, with a warning of several lines from each.
        for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
            os.environ.setdefault(name, '1')
    if '--verbose' not in checked:
        # Or PyTorch's store prints 20 frames of C++ for each call that fails, which we report.
        os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')
    # The command with which torchrun starts a rank.
    command = [os.environ.get('PYTHON_EXEC', sys.executable), '-u', *script]
    with end_children_on_signals(), RankServer(command) as server:
        # It imports PyTorch, as the server does meanwhile.
        preload('mmdevplug.cli.torchrun_agent')
        agent = import_module('mmdevplug.cli.torchrun_agent')
        with tempfile.NamedTemporaryFile('r') as answer:
            words = [f'--origin={origin}', f'--answer={answer.name}', str(settings.nproc)]
            # In a process of its own: looking at some devices takes hold of them.
            status = server.check([*words, *checked]).wait()
            if status == 0 and settings.nproc in COUNTED:
                settings = replace(settings, nproc=int(answer.read()))
        if status == 0:
            options = agent_options(settings, start.rendezvous)
            status = agent.run_agent([*options, *script], server)
    if status:
        raise SystemExit(status)


def agent_options(settings: LaunchOptions, rendezvous: Sequence[str] = ()) -> List[str]:
    """The options of torchrun, up to the script."""
    single = not settings.several_hosts
    restarts = settings.max_restarts
    if restarts is None:
        restarts = ELASTIC_RESTARTS if rendezvous else 0
    command = [
        # torchrun would take --nproc for an abbreviation of its own options.
        f'--nproc_per_node={settings.nproc}',
        f'--max_restarts={restarts}',
    ]
    if rendezvous:
        return [*command, *rendezvous]
    command += [f'--nnodes={settings.nnodes}', f'--node_rank={settings.node_rank or 0}']
    if settings.timeout is not None and not single:
        command.append(f'--rdzv_conf=timeout={max(1, round(settings.timeout))}')
    # With port 0 the agent takes a free one.
    return [
        *command,
        f'--master_addr={LOOPBACK if single else settings.master_addr}',
        f'--master_port={settings.master_port or (0 if single else DEFAULT_PORT)}',
    ]


def _drop_variables(start: Start) -> None:
    """Remove stale variables and those that were read, which torchrun would read once more."""
    read = {name for name in os.environ if name.startswith('PET_')} if start.used else set()
    for name in {*stale_variables('none'), *read}:
        del os.environ[name]


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


def read_hosts(nproc: int, environ: Mapping[str, str]) -> LaunchOptions:
    """Read the variables that name the hosts for ``tools/dist_train.sh``."""
    values: Dict[str, Any] = {}
    names = dict(NNODES='nnodes', NODE_RANK='node_rank', PORT='master_port')
    for name, key in dict(names, MAX_RESTARTS='max_restarts').items():
        found = environ.get(name)
        if found:
            values[key] = int(found) if found.isdecimal() and found.isascii() else found
            LaunchOptions.check(key, values[key], name)
    settings = LaunchOptions(nproc=nproc, **dict(dict(master_port=DEFAULT_PORT), **values))
    if not settings.several_hosts:
        return replace(settings, node_rank=None)  # Left over from another job.
    address = environ.get('MASTER_ADDR') or None
    if address is not None:
        LaunchOptions.check('master_addr', address, 'MASTER_ADDR')
    settings = replace(settings, master_addr=address)
    check_together(settings, 'NNODES, NODE_RANK, MASTER_ADDR')
    return settings


def _start_of_script(nproc: int) -> Start:
    """How ``tools/dist_train.sh`` starts: its own variables win over those of a launcher."""
    settings = read_hosts(nproc, os.environ)
    if settings.several_hosts:
        return Start(settings, rendezvous_of(settings))
    given: Dict[str, Any] = dict(nproc=nproc, max_restarts=settings.max_restarts)
    if os.environ.get('NNODES'):
        given['nnodes'] = 1
    if os.environ.get('PORT'):
        given['master_port'] = settings.master_port
    start = fill_in_hosts(given, os.environ)
    return start if start.settings.several_hosts or start.rendezvous else Start(settings)


def _read_count(word: str, origin: str) -> int:
    try:
        count = int(word)
    except ValueError:
        raise DevPlugError(f'NUM_DEVICES={word!r}: expected a number.') from None
    LaunchOptions.check('nproc', count, origin)
    return count


def count_processes(word: str, accelerator: 'Accelerator', origin: str) -> int:
    """Count the processes that torchrun's ``auto``, ``gpu`` or ``cpu`` stand for."""
    if word == 'cpu' or (word == 'auto' and accelerator.shares_devices):
        return usable_cores()
    if accelerator.shares_devices:
        raise LaunchError(
            f'{origin}={word}, but this job trains on {accelerator.name!r}, which has no devices '
            f'to count. Give the number of processes: --nproc N.'
        )
    return accelerator.max_ranks()


def _imports_may_fail(cfg: Config) -> bool:
    """Whether a package of ``custom_imports`` is missing, or OpenMMLab's, which check versions."""
    names = (cfg.get('custom_imports') or {}).get('imports') or []
    packages = {name.partition('.')[0] for name in ([names] if isinstance(names, str) else names)}
    own = ('mmdevplug', 'mmengine')
    return any(
        find_spec(package) is None or (package.startswith('mm') and package not in own)
        for package in packages
    )


def _chosen_accelerator(args: argparse.Namespace) -> 'Accelerator':
    """Choose the accelerator of a config.

    The config's modules take long to import. They are imported only if they may define the
    accelerator, or if that may fail, which is then said once for all ranks.
    """
    from mmdevplug.accelerators import choose_accelerator

    cfg = load_config(args, import_modules=False)
    options = AcceleratorOptions.from_config(cfg.get('accelerator'))
    device = options.device
    known = isinstance(device, dict) and device.get('type') in ACCELERATORS.module_dict
    if not known or _imports_may_fail(cfg):
        load_config(args)
    return choose_accelerator(device).accelerator


def main(argv: Optional[List[str]] = None) -> None:
    """Check a number of processes against the devices, and start them if there is a script."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(description=main.__doc__)
    parser.add_argument('--script', help='start this with the remaining arguments')
    parser.add_argument('--origin', default='NUM_DEVICES', help='its name in messages')
    parser.add_argument('--answer', help='a file for the number, where it is counted')
    parser.add_argument('num_devices')
    add_common_arguments(parser)
    args, _ = parser.parse_known_args(argv)
    if args.script is not None:
        wanted = _read_count(args.num_devices, args.origin)
        words = without_options(argv, ['--script'])
        script = [args.script, *words[1:], '--launcher', 'pytorch']
        _check_and_start(args.origin, words[1:], _start_of_script(wanted), script)
        return
    counted = args.num_devices in COUNTED
    wanted = 1 if counted else _read_count(args.num_devices, args.origin)
    check_room(wanted, args.origin, insist=args.oversubscribe)
    accelerator = _chosen_accelerator(args)
    if counted:
        wanted = count_processes(args.num_devices, accelerator, args.origin)
        check_room(wanted, args.origin, insist=args.oversubscribe)
    refuse_missing_devices(accelerator, wanted, args.origin)
    if args.origin == DEFAULT_COUNT:
        name_unused_devices(accelerator, wanted)
    if counted and args.answer is not None:
        Path(args.answer).write_text(str(wanted))


if __name__ == '__main__':
    sys.exit(run(main))
