"""Starting several processes on this host, after counting its devices."""

import argparse
import socket
import subprocess
import sys
from typing import List, Optional

from mmdevplug.device import choose_accelerator
from mmdevplug.device.detection import accelerator_options
from mmdevplug.errors import DevPlugError, LaunchError

from .common import add_common_arguments, load_config, run


def check_device_count(config: argparse.Namespace, wanted: int) -> None:
    """Refuse more processes than this host has devices.

    Args:
        config (argparse.Namespace): Arguments of a script, which name the config.
        wanted (int): Number of processes on this host.

    Raises:
        DevPlugError: If ``wanted`` is less than 1 or more than there are devices.
    """
    if wanted < 1:
        raise LaunchError(f'NUM_DEVICES={wanted}: expected 1 or more processes.')
    options = accelerator_options(load_config(config).get('accelerator'))
    for key in ('backend', 'hook'):
        options.pop(key, None)
    accelerator = choose_accelerator(options).accelerator
    count = accelerator.device_count()
    if not accelerator.shares_devices and wanted > count:
        raise LaunchError(
            f'NUM_DEVICES={wanted}, but this host has {count} {accelerator.name} device(s) '
            f'({accelerator.describe_visibility()}). Start at most {count} processes, or make '
            f'more devices visible.'
        )


def launch(module: str, argv: List[str], args: argparse.Namespace) -> None:
    """Run a module in ``args.nproc`` processes of torchrun on this host.

    Args:
        module (str): A module with a ``__main__`` part.
        argv (List[str]): Its arguments, with ``--nproc N`` among them.
        args (argparse.Namespace): The same, parsed.

    Raises:
        DevPlugError: If there are too few devices or a process failed.
    """
    # In a process of its own: looking at some devices takes hold of them.
    counted = subprocess.run([sys.executable, '-m', __name__, str(args.nproc), *argv])
    if counted.returncode:
        raise SystemExit(counted.returncode)
    command = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=1']
    command += [f'--nproc_per_node={args.nproc}', '--master_addr=127.0.0.1']
    command += [f'--master_port={free_port()}', '-m', module]
    # torchrun would take --nproc for an abbreviation of its own options.
    command += [*_without(argv, '--nproc'), '--launcher', 'pytorch']
    status = subprocess.run(command).returncode
    if status:
        raise SystemExit(status)


def _without(argv: List[str], option: str) -> List[str]:
    """Remove ``option VALUE`` and ``option=VALUE``."""
    kept: List[str] = []
    words = iter(argv)
    for word in words:
        if word == option:
            next(words)
        elif not word.startswith(f'{option}='):
            kept.append(word)
    return kept


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def main(argv: Optional[List[str]] = None) -> None:
    """Check a number of processes against the devices: ``NUM_DEVICES CONFIG [arguments]``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument('num_devices')
    parser.add_argument('config')
    add_common_arguments(parser)
    args, _ = parser.parse_known_args(argv)
    try:
        wanted = int(args.num_devices)
    except ValueError:
        raise DevPlugError(f'NUM_DEVICES={args.num_devices!r}: expected a number.') from None
    check_device_count(args, wanted)


if __name__ == '__main__':
    sys.exit(run(main))
