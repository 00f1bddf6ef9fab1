"""Start the processes of a job, after counting the devices of this host."""

import argparse
import os
import sys
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Sequence

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.config.accelerator import AcceleratorOptions
from mmdevplug.doctor.limits import available_memory
from mmdevplug.environments.launch import DEFAULT_PORT
from mmdevplug.environments.loopback import LOOPBACK
from mmdevplug.environments.stale import (
    forget_stale_variables,
    refuse_to_run_alone,
    stale_variables,
)
from mmdevplug.errors import DevPlugError, LaunchError
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.host import usable_cores

from .common import add_common_arguments, load_config, run
from .launch_settings import (
    LAUNCH_FLAGS,
    LaunchSettings,
    check_together,
    check_value,
    settings_from,
)
from .signals import replace_process, run_check

#: What a process holds that has imported PyTorch and MMEngine and has no model yet: 154 MB of its
#: own, with PyTorch 2.13 for the CPU.
LEAST_BYTES_PER_RANK = 150 << 20


def check_device_count(
    config: argparse.Namespace, wanted: int, origin: str = 'NUM_DEVICES'
) -> None:
    """Refuse more processes than this host has devices, or memory for.

    Args:
        config (argparse.Namespace): Arguments of a script, which name the config.
        wanted (int): Number of processes on this host.
        origin (str): What to call the number in messages.

    Raises:
        DevPlugError: If ``wanted`` is less than 1 or more than there are devices.
    """
    if wanted < 1:
        raise LaunchError(f'{origin}={wanted}: expected 1 or more processes.')
    check_room(wanted, origin, insist=getattr(config, 'oversubscribe', False))
    options = AcceleratorOptions.from_config(load_config(config).get('accelerator'))
    accelerator = choose_accelerator(options.device).accelerator
    count = accelerator.device_count()
    if not accelerator.shares_devices and wanted > count:
        raise LaunchError(
            f'{origin}={wanted}, but this host has {count} {accelerator.name} device(s) '
            f'({accelerator.describe_visibility()}). Start at most {count} processes, or make '
            f'more devices visible.'
        )


def check_room(wanted: int, origin: str, insist: bool = False) -> None:
    """Refuse more processes than memory holds, and warn of more than there are cores.

    Args:
        wanted (int): Number of processes on this host.
        origin (str): What to call the number in messages.
        insist (bool): Whether to start them all the same. Defaults to False.

    Raises:
        LaunchError: If memory cannot hold them.
    """
    available, whose = available_memory()
    most = available // LEAST_BYTES_PER_RANK
    if wanted > most and not insist:
        raise LaunchError(
            f'{origin}={wanted}, but the memory that is available ({format_bytes(available)}, '
            f'{whose}) holds at most {most} processes of {format_bytes(LEAST_BYTES_PER_RANK)} '
            f'each, which PyTorch alone takes. Start fewer, or insist with --oversubscribe.'
        )
    cores = usable_cores()
    if wanted > cores and not insist:
        print(
            f'mmdevplug: {origin}={wanted}, but this process may use {cores} core(s): processes '
            f'will wait for each other. Start {cores} or fewer; --oversubscribe silences this.',
            file=sys.stderr,
            flush=True,
        )


def launch(module: str, argv: List[str], args: argparse.Namespace) -> NoReturn:
    """Become torchrun, which runs a module in the processes that flags or a launch file ask for.

    Args:
        module (str): A module with a ``__main__`` part.
        argv (List[str]): Its arguments, with those that start processes among them.
        args (argparse.Namespace): The same, parsed.

    Raises:
        DevPlugError: If the settings are wrong, or there are too few devices.
        SystemExit: If there are too few devices.
    """
    path = getattr(args, 'launch', None)
    settings = settings_from(args, path)
    if settings.nnodes == 1:
        refuse_to_run_alone()
    words = without_options(argv, LAUNCH_FLAGS)
    if args.accelerator is None and settings.accelerator not in (None, 'auto'):
        words += ['--accelerator', settings.accelerator]
    if args.timeout is None and settings.timeout is not None:
        words += ['--timeout', str(settings.timeout)]
    environ = _environment(settings.env)
    origin = '--nproc' if path is None or args.nproc is not None else f'{path}: nproc'
    # torchrun would take --nproc for an abbreviation of its own options.
    command = [*agent_command(settings), '-m', module, *words, '--launcher', 'pytorch']
    _check_and_start([f'--origin={origin}', str(settings.nproc), *words], command, environ)


def _check_and_start(
    checked: Sequence[str], command: Sequence[str], environ: Mapping[str, str]
) -> NoReturn:
    """Check a number of processes, then become the process that starts them.

    Args:
        checked (Sequence[str]): Arguments of :func:`main`.
        command (Sequence[str]): What to become.
        environ (Mapping): The variables of both.
    """
    # In a process of its own: looking at some devices takes hold of them.
    status = run_check([sys.executable, '-m', 'mmdevplug.cli.launch', *checked], environ)
    if status:
        raise SystemExit(status)
    replace_process(command, environ)


def agent_command(settings: LaunchSettings) -> List[str]:
    """The command line of torchrun, up to the script."""
    command = [sys.executable, '-m', 'mmdevplug.cli.torchrun_agent']
    command += [f'--nproc_per_node={settings.nproc}', f'--max_restarts={settings.max_restarts}']
    if settings.nnodes == 1:
        # Port 0: the agent takes a free one.
        return [
            *command,
            '--nnodes=1',
            f'--master_addr={LOOPBACK}',
            f'--master_port={settings.master_port or 0}',
        ]
    command += [f'--nnodes={settings.nnodes}', f'--node_rank={settings.node_rank}']
    if settings.timeout is not None:
        command += [f'--rdzv_conf=timeout={max(1, round(settings.timeout))}']
    return [
        *command,
        f'--master_addr={settings.master_addr}',
        f'--master_port={settings.master_port or DEFAULT_PORT}',
    ]


def _environment(wanted: Dict[str, str]) -> Dict[str, str]:
    """This process's variables without stale ones, with those of a launch file."""
    stale = stale_variables('none')
    environ = {name: value for name, value in os.environ.items() if name not in stale}
    for name, value in wanted.items():
        if environ.setdefault(name, value) != value:
            print(
                f'mmdevplug: {name}={environ[name]} of the shell wins over {value} of the launch '
                f'file.',
                file=sys.stderr,
            )
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


def check_hosts(environ: Mapping[str, str]) -> None:
    """Check the variables with which ``tools/dist_train.sh`` is told of several hosts.

    Args:
        environ (Mapping): With ``NNODES``, ``NODE_RANK``, ``MASTER_ADDR``, ``PORT`` and
            ``MAX_RESTARTS``, where they are set.

    Raises:
        LaunchError: If one is impossible or contradicts another.
    """
    values: Dict[str, Any] = {}
    names = dict(NNODES='nnodes', NODE_RANK='node_rank', PORT='master_port')
    for name, key in dict(names, MAX_RESTARTS='max_restarts').items():
        found = environ.get(name)
        if found:
            values[key] = int(found) if found.isdecimal() and found.isascii() else found
            check_value(key, values[key], name)
    address = environ.get('MASTER_ADDR') or None
    settings = LaunchSettings(nproc=1, **values)
    if settings.nnodes == 1:
        return  # NODE_RANK and MASTER_ADDR of another job are not used.
    if address is not None:
        check_value('master_addr', address, 'MASTER_ADDR')
    check_together(settings._replace(master_addr=address), 'NNODES, NODE_RANK, MASTER_ADDR')


def script_command(script: str, words: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    """The command line of torchrun for a script of ``tools/``.

    Args:
        script (str): Its path.
        words (Sequence[str]): NUM_DEVICES, CONFIG and the other arguments of the script.
        environ (Mapping): The variables of :func:`check_hosts`.
    """
    several = environ.get('NNODES') not in (None, '', '1')
    # Left over from another job, these would be waited for.
    master = environ.get('MASTER_ADDR', '') if several else LOOPBACK
    node_rank = environ.get('NODE_RANK') if several else None
    command = [
        sys.executable,
        '-m',
        'mmdevplug.cli.torchrun_agent',
        f'--nproc_per_node={words[0]}',
    ]
    command += [f'--nnodes={environ["NNODES"] if several else 1}', f'--node_rank={node_rank or 0}']
    command += [f'--master_addr={master}', f'--master_port={environ.get("PORT") or DEFAULT_PORT}']
    command += [f'--max_restarts={environ.get("MAX_RESTARTS") or 0}']
    return [*command, script, *words[1:], '--launcher', 'pytorch']


def main(argv: Optional[List[str]] = None) -> None:
    """Check a number of processes against the devices, and start them if there is a script."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument('--script', help='start this with the remaining arguments')
    parser.add_argument('--origin', default='NUM_DEVICES', help='its name in messages')
    parser.add_argument('num_devices')
    parser.add_argument('config')
    add_common_arguments(parser)
    args, _ = parser.parse_known_args(argv)
    if args.script is not None:
        words = without_options(argv, ['--script'])
        command = script_command(args.script, words, os.environ)
        if '--nnodes=1' in command:
            refuse_to_run_alone()
        address = {k: v for k, v in os.environ.items() if k == 'MASTER_ADDR'}
        _check_and_start(words, command, {**_environment({}), **address})
    try:
        wanted = int(args.num_devices)
    except ValueError:
        raise DevPlugError(f'NUM_DEVICES={args.num_devices!r}: expected a number.') from None
    if args.origin == 'NUM_DEVICES':
        check_hosts(os.environ)
    forget_stale_variables('none')
    check_device_count(args, wanted, args.origin)


if __name__ == '__main__':
    sys.exit(run(main))
