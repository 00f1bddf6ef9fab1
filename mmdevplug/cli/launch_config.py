"""``mmdevplug launch-config``: write a launch file for what is present."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import List, Optional

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.config.fields import options_of
from mmdevplug.config.launch import LaunchOptions
from mmdevplug.environments.launch import DEFAULT_PORT
from mmdevplug.environments.loopback import LOOPBACK
from mmdevplug.environments.slurm import first_host, job_port
from mmdevplug.errors import LaunchError
from mmdevplug.utils.atomic_files import write_text

from .arguments import Parser
from .launch import count_processes, refuse_missing_devices
from .launch_settings import add_launch_arguments, check_together, flags_of


def build_parser() -> argparse.ArgumentParser:
    """The arguments of ``mmdevplug launch-config``."""
    parser = Parser(
        prog='mmdevplug launch-config',
        description='Look at the devices and hosts and write a launch file for mmdevplug train',
    )
    parser.add_argument('--out', default='launch.yaml', help='the file to write')
    parser.add_argument('--force', action='store_true', help='replace the file if there is one')
    parser.add_argument('--accelerator', help='the accelerator; what is present by default')
    add_launch_arguments(parser)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Write a launch file, unless a value is impossible or the file exists."""
    args = build_parser().parse_args(argv)
    flags = flags_of(args)
    accelerator = choose_accelerator(args.accelerator).accelerator
    nproc = flags.get('nproc', 1 if accelerator.shares_devices else accelerator.max_ranks())
    if isinstance(nproc, str):
        nproc = count_processes(nproc, accelerator, '--nproc')
    refuse_missing_devices(accelerator, nproc, '--nproc')
    settings = LaunchOptions(
        accelerator=accelerator.name, timeout=1800, env=dict(OMP_NUM_THREADS='1')
    )
    settings = replace(_with_slurm(settings), **{**flags, 'nproc': nproc})
    # Only the hosts' own files have a node rank; without one the file is for all of them.
    check_together(replace(settings, node_rank=settings.node_rank or 0))
    why = f'This host has {accelerator.device_count()} {accelerator.name} device(s).'
    if accelerator.shares_devices:
        why = f'The {accelerator.name} takes as many as its cores allow.'
    if os.path.lexists(args.out) and not args.force:
        raise LaunchError(f'{args.out} exists already. Pass --force to replace it, or --out.')
    try:
        write_text(render(settings, Path(args.out).name, why), args.out)
    except OSError as error:
        raise LaunchError(
            f'--out {args.out!r} cannot be written: {error}. Choose another.'
        ) from error
    print(
        f'{args.out}: {settings.nproc} process(es) on {settings.accelerator!r} on each of '
        f'{settings.nnodes} host(s). Start: mmdevplug train CONFIG --launch {args.out}'
    )


def _with_slurm(settings: LaunchOptions) -> LaunchOptions:
    """Fill in the hosts of a job of Slurm."""
    hosts = os.environ.get('SLURM_NNODES') or os.environ.get('SLURM_JOB_NUM_NODES')
    if hosts is None or hosts == '1':
        return settings
    if not hosts.isdecimal() or int(hosts) < 1:
        raise LaunchError(f'SLURM_NNODES={hosts!r}: expected 1 or more. Give --nnodes.')
    return replace(
        settings,
        nnodes=int(hosts),
        master_addr=first_host(os.environ),
        master_port=job_port(os.environ),
    )


def render(settings: LaunchOptions, name: str, why: str) -> str:
    """The text of a launch file: each option below its meaning."""
    single = settings.nnodes == 1
    values = dict(
        vars(settings),
        master_addr=LOOPBACK if single else settings.master_addr,
        master_port=settings.master_port or (None if single else DEFAULT_PORT),
    )
    lines = [
        f'# Written by `mmdevplug launch-config`. Use it: mmdevplug train CONFIG --launch {name}',
        '# Flags of the same names win: --nproc 2, --node-rank 1, ...',
    ]
    for one in options_of(LaunchOptions):
        value = values[one.name]
        if single and one.name == 'node_rank':
            continue
        lines += ['', f'# {one.metadata["meaning"]}' + (f' {why}' if one.name == 'nproc' else '')]
        if value is None:
            lines.append(f'# {one.name}: {DEFAULT_PORT if one.name == "master_port" else 0}')
        elif isinstance(value, dict):
            lines += [f'{one.name}:', *(f'  {key}: {each}' for key, each in value.items())]
        else:
            lines.append(f'{one.name}: {value}')
    return '\n'.join(lines) + '\n'
