"""Starting the processes of a job, after counting the devices of this host."""

import argparse
import os
import subprocess
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence

from mmdevplug.device import choose_accelerator
from mmdevplug.device.detection import accelerator_options
from mmdevplug.dist.launch import DEFAULT_PORT
from mmdevplug.dist.loopback import LOOPBACK
from mmdevplug.dist.options import RUNNER_OPTIONS
from mmdevplug.dist.stale import forget_stale_variables, stale_variables
from mmdevplug.errors import DevPlugError, LaunchError

from .common import add_common_arguments, load_config, run
from .launch_settings import (
    LAUNCH_FLAGS,
    LaunchSettings,
    check_together,
    check_value,
    settings_from,
)


def check_device_count(
    config: argparse.Namespace, wanted: int, origin: str = 'NUM_DEVICES'
) -> None:
    """Refuse more processes than this host has devices.

    Args:
        config (argparse.Namespace): Arguments of a script, which name the config.
        wanted (int): Number of processes on this host.
        origin (str): What to call the number in messages.

    Raises:
        DevPlugError: If ``wanted`` is less than 1 or more than there are devices.
    """
    if wanted < 1:
        raise LaunchError(f'{origin}={wanted}: expected 1 or more processes.')
    options = accelerator_options(load_config(config).get('accelerator'))
    for key in RUNNER_OPTIONS:
        options.pop(key, None)
    accelerator = choose_accelerator(options).accelerator
    count = accelerator.device_count()
    if not accelerator.shares_devices and wanted > count:
        raise LaunchError(
            f'{origin}={wanted}, but this host has {count} {accelerator.name} device(s) '
            f'({accelerator.describe_visibility()}). Start at most {count} processes, or make '
            f'more devices visible.'
        )


def launch(module: str, argv: List[str], args: argparse.Namespace) -> None:
    """Run a module in the processes that flags or a launch file ask for, under torchrun.

    Args:
        module (str): A module with a ``__main__`` part.
        argv (List[str]): Its arguments, with those that start processes among them.
        args (argparse.Namespace): The same, parsed.

    Raises:
        DevPlugError: If the settings are wrong, or there are too few devices.
        SystemExit: If a process failed.
    """
    path = getattr(args, 'launch', None)
    settings = settings_from(args, path)
    words = without_options(argv, LAUNCH_FLAGS)
    if args.accelerator is None and settings.accelerator not in (None, 'auto'):
        words += ['--accelerator', settings.accelerator]
    if args.timeout is None and settings.timeout is not None:
        words += ['--timeout', str(settings.timeout)]
    environ = _environment(settings.env)
    origin = '--nproc' if path is None or args.nproc is not None else f'{path}: nproc'
    # In a process of its own: looking at some devices takes hold of them.
    counted = subprocess.run(
        [sys.executable, '-m', __name__, f'--origin={origin}', str(settings.nproc), *words],
        env=environ,
    )
    if counted.returncode:
        raise SystemExit(counted.returncode)
    # torchrun would take --nproc for an abbreviation of its own options.
    command = [*agent_command(settings), '-m', module, *words, '--launcher', 'pytorch']
    status = subprocess.run(command, env=environ).returncode
    if status:
        raise SystemExit(status)


def agent_command(settings: LaunchSettings) -> List[str]:
    """The command line of torchrun, up to the script."""
    command = [sys.executable, '-m', 'mmdevplug.cli.agent']
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


def main(argv: Optional[List[str]] = None) -> None:
    """Check a number of processes against the devices: ``NUM_DEVICES CONFIG [arguments]``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument('--origin', default='NUM_DEVICES', help='its name in messages')
    parser.add_argument('num_devices')
    parser.add_argument('config')
    add_common_arguments(parser)
    args, _ = parser.parse_known_args(argv)
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
