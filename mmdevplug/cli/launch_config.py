"""``mmdevplug launch-config``: write how ``accelerate`` and ``torchrun`` start a job."""

import argparse
import os
from dataclasses import replace
from typing import Any, List, Optional

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.accelerators.counting import count_devices, refuse_missing_devices
from mmdevplug.config.launch_options import COUNTED
from mmdevplug.environments.launch_variables import DEFAULT_PORT
from mmdevplug.environments.starting import accelerate_config, torchrun_options
from mmdevplug.errors import LaunchError
from mmdevplug.utils.atomic_files import check_writable, write_text

from . import say
from .arguments import Parser
from .hosts import add_launch_arguments, read_job


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug launch-config``."""
    parser = Parser(
        prog='mmdevplug launch-config',
        description='Write a file for accelerate launch --config_file, and print the commands '
        'with which accelerate and torchrun start the job, at port 29500 without --master-port',
    )
    parser.add_argument('--out', default='accelerate.yaml', help='the file to write')
    parser.add_argument('--force', action='store_true', help='replace the file if there is one')
    parser.add_argument('--accelerator', help='the accelerator; what is present by default')
    add_launch_arguments(parser, ['nproc', 'nnodes', 'node_rank', 'master_addr', 'master_port'])
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Write the file, unless a value is impossible or the file exists."""
    args = build_parser().parse_args(argv)
    settings = read_job(args)
    if settings.elastic:
        raise LaunchError(
            f'--nnodes={settings.nnodes}: expected a number of hosts such as --nnodes=2, because '
            f'hosts cannot join and leave a job of accelerate. Start it with mmdevplug train.'
        )
    accelerator = choose_accelerator(args.accelerator).accelerator
    nproc: Any = settings.nproc
    if nproc in COUNTED:
        nproc = count_devices(nproc, accelerator)
    refuse_missing_devices(accelerator, nproc)
    settings = replace(settings, nproc=nproc, master_port=settings.master_port or DEFAULT_PORT)
    if os.path.lexists(args.out) and not args.force:
        raise LaunchError(f'{args.out} exists already. Pass --force to replace it, or --out.')
    check_writable(args.out, '--out')
    write_text(accelerate_config(settings, accelerator.name == 'cpu'), args.out)
    train = '-m mmdevplug train CONFIG'
    if args.accelerator is not None:
        train += f' --accelerator {args.accelerator}'
    print(f'accelerate launch --config_file {args.out} {train}')
    print(f'torchrun {" ".join(torchrun_options(settings))} {train}')
    say(f"to start a script of your own, write its name, e.g. train.py, in place of '{train}'")
