"""``mmdevplug launch-config``: write how ``accelerate`` and ``torchrun`` start a job."""

import argparse
import json
import os
from dataclasses import replace
from typing import List, Optional

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.config.launch_options import COUNTED, LaunchOptions
from mmdevplug.environments.launch_variables import DEFAULT_PORT
from mmdevplug.errors import LaunchError
from mmdevplug.utils.atomic_files import check_writable, write_text

from . import say
from .arguments import Parser
from .launch import agent_options, count_processes, refuse_missing_devices
from .launch_settings import add_launch_arguments, read_settings


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
    settings, rendezvous, _ = read_settings(args)
    if rendezvous:
        raise LaunchError(
            f'{rendezvous[0]}: expected a number of hosts such as --nnodes=2, because hosts '
            f'cannot join and leave a job of accelerate. Start it with mmdevplug train.'
        )
    accelerator = choose_accelerator(args.accelerator).accelerator
    nproc = settings.nproc
    if nproc in COUNTED:
        nproc = count_processes(nproc, accelerator, '--nproc')
    refuse_missing_devices(accelerator, nproc, '--nproc')
    settings = replace(settings, nproc=nproc, master_port=settings.master_port or DEFAULT_PORT)
    if os.path.lexists(args.out) and not args.force:
        raise LaunchError(f'{args.out} exists already. Pass --force to replace it, or --out.')
    check_writable(args.out, '--out')
    write_text(accelerate_config(settings, accelerator.name == 'cpu'), args.out)
    train = '-m mmdevplug train CONFIG'
    if args.accelerator is not None:
        train += f' --accelerator {args.accelerator}'
    print(f'accelerate launch --config_file {args.out} {train}')
    print(f'torchrun {" ".join(agent_options(settings))} {train}')
    say(f"to start a script of your own, write its name, e.g. train.py, in place of '{train}'")


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
        num_processes=settings.nproc * settings.nnodes,
        num_machines=settings.nnodes,
        machine_rank=settings.node_rank or 0,
        main_process_ip=settings.master_addr,
        main_process_port=settings.master_port,
    )
    # YAML reads JSON's values; a name such as `1e3` stays a name in quotes.
    return ''.join(f'{key}: {json.dumps(value)}\n' for key, value in values.items())
