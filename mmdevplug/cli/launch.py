"""Start the processes of a job, after counting the devices of this host."""

import argparse
import os
import sys
from dataclasses import replace
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Sequence

from mmdevplug.accelerators import Accelerator, choose_accelerator
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.config.launch import LaunchOptions
from mmdevplug.environments.launch import DEFAULT_PORT
from mmdevplug.environments.loopback import LOOPBACK
from mmdevplug.environments.stale import (
    forget_stale_variables,
    refuse_to_run_alone,
    stale_variables,
)
from mmdevplug.errors import DevPlugError, LaunchError
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.host import available_memory, usable_cores

from . import say
from .common import add_common_arguments, load_config, run
from .forward_signals import replace_process, run_check
from .launch_settings import LAUNCH_FLAGS, check_together, read_settings

#: What a process holds that has imported PyTorch and MMEngine and has no model yet: 154 MB of its
#: own, with PyTorch 2.13 for the CPU.
LEAST_BYTES_PER_RANK = 150 << 20


def refuse_missing_devices(accelerator: Accelerator, wanted: int, origin: str) -> None:
    """Refuse more processes than this host has devices, unless processes share them."""
    most = accelerator.max_ranks()
    if not accelerator.shares_devices and wanted > most:
        raise LaunchError(
            f'{origin}={wanted}, but this host has {accelerator.device_count()} '
            f'{accelerator.name} device(s) ({accelerator.describe_visibility()}). Start at most '
            f'{most} processes, or make more devices visible.'
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


def launch(module: str, argv: List[str], args: argparse.Namespace) -> NoReturn:
    """Become torchrun, which runs a module in several processes; ``args`` are ``argv`` parsed."""
    settings = read_settings(args, args.launch)
    if settings.nnodes == 1:
        refuse_to_run_alone()
    words = without_options(argv, LAUNCH_FLAGS)
    if args.accelerator is None and settings.accelerator not in (None, 'auto'):
        words += ['--accelerator', settings.accelerator]
    if args.timeout is None and settings.timeout is not None:
        words += ['--timeout', str(settings.timeout)]
    from_file = args.launch is not None and args.nproc is None
    origin = f'{args.launch}: nproc' if from_file else '--nproc'
    command = [*agent_command(settings), '-m', module, *words, '--launcher', 'pytorch']
    checked = [f'--origin={origin}', str(settings.nproc), *words]
    _check_and_start(checked, command, _environment(settings.env))


def _check_and_start(
    checked: Sequence[str], command: Sequence[str], environ: Mapping[str, str]
) -> NoReturn:
    """Check a number of processes with :func:`main`, then become the process that starts them."""
    # In a process of its own: looking at some devices takes hold of them.
    status = run_check([sys.executable, '-m', 'mmdevplug.cli.launch', *checked], environ)
    if status:
        raise SystemExit(status)
    replace_process(command, environ)


def agent_command(settings: LaunchOptions) -> List[str]:
    """The command line of torchrun, up to the script."""
    single = settings.nnodes == 1
    command = [
        *(sys.executable, '-m', 'mmdevplug.cli.torchrun_agent'),
        # torchrun would take --nproc for an abbreviation of its own options.
        f'--nproc_per_node={settings.nproc}',
        f'--max_restarts={settings.max_restarts}',
        f'--nnodes={settings.nnodes}',
        f'--node_rank={settings.node_rank or 0}',
    ]
    if settings.timeout is not None and not single:
        command.append(f'--rdzv_conf=timeout={max(1, round(settings.timeout))}')
    # With port 0 the agent takes a free one.
    return [
        *command,
        f'--master_addr={LOOPBACK if single else settings.master_addr}',
        f'--master_port={settings.master_port or (0 if single else DEFAULT_PORT)}',
    ]


def _environment(given: Dict[str, str]) -> Dict[str, str]:
    """Return this process's variables without stale ones, and those of a launch file."""
    stale = stale_variables('none')
    environ = {name: value for name, value in os.environ.items() if name not in stale}
    for name, value in given.items():
        if environ.setdefault(name, value) != value:
            say(f'{name}={environ[name]} of the shell wins over {value} of the launch file.')
    return environ


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
    if settings.nnodes == 1:
        return replace(settings, node_rank=None)  # Left over from another job.
    address = environ.get('MASTER_ADDR') or None
    if address is not None:
        LaunchOptions.check('master_addr', address, 'MASTER_ADDR')
    settings = replace(settings, master_addr=address)
    check_together(settings, 'NNODES, NODE_RANK, MASTER_ADDR')
    return settings


def main(argv: Optional[List[str]] = None) -> None:
    """Check a number of processes against the devices, and start them if there is a script."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument('--script', help='start this with the remaining arguments')
    parser.add_argument('--origin', default='NUM_DEVICES', help='its name in messages')
    parser.add_argument('num_devices')
    add_common_arguments(parser)
    args, _ = parser.parse_known_args(argv)
    try:
        wanted = int(args.num_devices)
    except ValueError:
        raise DevPlugError(f'NUM_DEVICES={args.num_devices!r}: expected a number.') from None
    LaunchOptions.check('nproc', wanted, args.origin)
    if args.script is not None:
        hosts = read_hosts(wanted, os.environ)
        if hosts.nnodes == 1:
            refuse_to_run_alone()
        words = without_options(argv, ['--script'])
        command = [*agent_command(hosts), args.script, *words[1:], '--launcher', 'pytorch']
        _check_and_start(words, command, _environment({}))
    forget_stale_variables('none')
    check_room(wanted, args.origin, insist=args.oversubscribe)
    options = AcceleratorOptions.from_config(load_config(args).get('accelerator'))
    refuse_missing_devices(choose_accelerator(options.device).accelerator, wanted, args.origin)


if __name__ == '__main__':
    sys.exit(run(main))
