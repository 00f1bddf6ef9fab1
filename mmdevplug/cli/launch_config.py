"""``mmdevplug launch-config``: write a launch file for what is present."""

import argparse
import os
import sys
from typing import List, Optional

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.environments.launch import slurm_first_host, slurm_port
from mmdevplug.errors import LaunchError

from .common import run
from .launch_settings import (
    LaunchSettings,
    add_launch_arguments,
    check_together,
    check_value,
    write_launch_file,
)


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug launch-config``."""
    parser = argparse.ArgumentParser(
        prog='mmdevplug launch-config',
        description='Look at the devices and hosts and write a launch file for mmdevplug train',
        allow_abbrev=False,
    )
    parser.add_argument('--out', default='launch.yaml', help='the file to write')
    parser.add_argument('--force', action='store_true', help='replace the file if there is one')
    parser.add_argument('--accelerator', help='the accelerator; what is present by default')
    add_launch_arguments(parser)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Write a launch file.

    Args:
        argv (List[str], optional): Arguments; those of the command line when None.

    Raises:
        DevPlugError: If a value is impossible, or the file exists.
    """
    args = build_parser().parse_args(argv)
    given = {name: getattr(args, name, None) for name in LaunchSettings._fields}
    flags = {name: value for name, value in given.items() if value is not None}
    for key, value in flags.items():
        check_value(key, value, f'--{key.replace("_", "-")}')
    accelerator = choose_accelerator(args.accelerator).accelerator
    count = accelerator.device_count()
    nproc = flags.get('nproc', 1 if accelerator.shares_devices else count)
    if not accelerator.shares_devices and nproc > count:
        raise LaunchError(
            f'--nproc={nproc}, but this host has {count} {accelerator.name} device(s) '
            f'({accelerator.describe_visibility()}). Ask for at most {count}.'
        )
    settings = LaunchSettings(accelerator=args.accelerator or accelerator.name, nproc=nproc)
    settings = _with_slurm(settings)._replace(**{**flags, 'nproc': nproc})
    # Only the hosts' own files have a node rank; without one the file is for all of them.
    check_together(settings._replace(node_rank=settings.node_rank or 0))
    if accelerator.shares_devices:
        why = f'The {accelerator.name} takes as many as its cores allow.'
    else:
        why = f'This host has {count} {accelerator.name} device(s).'
    write_launch_file(args.out, settings, why, force=args.force)
    print(
        f'{args.out}: {settings.nproc} process(es) on {settings.accelerator!r} on each of '
        f'{settings.nnodes} host(s). Start: mmdevplug train CONFIG --launch {args.out}'
    )


def _with_slurm(settings: LaunchSettings) -> LaunchSettings:
    """Fill in the hosts of a job of Slurm."""
    hosts = os.environ.get('SLURM_NNODES') or os.environ.get('SLURM_JOB_NUM_NODES')
    if hosts is None or hosts == '1':
        return settings
    if not hosts.isdecimal() or int(hosts) < 1:
        raise LaunchError(f'SLURM_NNODES={hosts!r}: expected 1 or more. Give --nnodes.')
    return settings._replace(
        nnodes=int(hosts),
        master_addr=slurm_first_host(os.environ),
        master_port=slurm_port(os.environ),
    )


if __name__ == '__main__':
    sys.exit(run(main))
