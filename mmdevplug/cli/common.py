"""Arguments and steps that the training and the testing script share."""

import argparse
import os
import re
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Callable, List, Optional, Sequence

from mmengine.config import Config

from mmdevplug.config.load import KeyValueAction, find_unread, load_file, overlay_accelerator
from mmdevplug.config.runner_config import refuse_flexible_runner
from mmdevplug.environments.launch_variables import (
    LAUNCHERS,
    LaunchEnv,
    forget_stale_variables,
    read_launch_env,
)
from mmdevplug.errors import CheckpointError, DevPlugError
from mmdevplug.fault_tolerance.abort import note_for_agent, note_path
from mmdevplug.fault_tolerance.ended_ranks import end_with_mim
from mmdevplug.patches.runner_type import follow_runner_type
from mmdevplug.utils.brief_terminal import BriefTerminal
from mmdevplug.utils.broken_imports import explain_import
from mmdevplug.utils.warnings_once import says_first

from . import say


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that OpenMMLab's scripts have in common, and ours."""
    add_config_arguments(parser)
    parser.add_argument('--work-dir', help='the folder for logs, checkpoints and results')
    parser.add_argument(
        '--launcher',
        choices=LAUNCHERS,
        help='what started the processes (default: found in the environment variables that '
        'torchrun, Slurm, MPI or Kubernetes set; none without them)',
    )
    parser.add_argument(
        '--model-parallel',
        choices=['true', 'false', 'auto'],
        help='spread the model over several devices; auto decides by what is present',
    )
    parser.add_argument(
        '--oversubscribe',
        action='store_true',
        help='start more processes than there are cores, or than memory is thought to hold',
    )
    parser.add_argument(
        '--verbose', action='store_true', help='show the whole log on the terminal, as in the file'
    )
    # Passed by torch.distributed.launch; torchrun and we use the environment variable.
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a config and the arguments that change it."""
    parser.add_argument('config', help='path of the config')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=KeyValueAction,
        help='override settings of the config: key=value, key="[a,b]"',
    )
    parser.add_argument(
        '--accelerator',
        help='use this accelerator, whose base config is laid over CONFIG: auto, cpu, cuda, xla, '
        'gcu, npu, mlu, musa, xpu, hpu, mps, tpu, or the name of any other that PyTorch knows',
    )


def load_config(args: argparse.Namespace, import_modules: bool = True) -> Config:
    """Load a config for ``RUNNERS.build`` and apply the common arguments.

    Args:
        args (Namespace): What :func:`add_common_arguments` reads.
        import_modules (bool): Import what ``custom_imports`` names. Defaults to True.
    """
    if '::' not in args.config and not Path(args.config).is_file():
        raise DevPlugError(
            f'CONFIG {args.config!r} is no file. Give the path of a config, e.g. '
            f'configs/digits/digits_cpu.py, or one of an installed package, e.g. '
            f'mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py.'
        )
    cfg = load_file(args.config, import_modules)
    if args.accelerator:
        overlay_accelerator(cfg, args.accelerator)
    cfg.setdefault('runner_type', 'DeviceRunner')
    follow_runner_type()
    cfg.setdefault('accelerator', dict(type='auto', backend='auto'))
    if isinstance(cfg.accelerator, str):
        cfg.accelerator = dict(type=cfg.accelerator)  # which --cfg-options can add to
    cfg.launcher = args.launcher or 'none'
    if args.model_parallel is not None:
        options = cfg.get('model_parallel')
        enable = dict(true=True, false=False, auto=None)[args.model_parallel]
        cfg.model_parallel = dict(options if isinstance(options, dict) else {}, enable=enable)
    if getattr(args, 'timeout', None) is not None:
        cfg.merge_from_dict({'env_cfg.dist_cfg.timeout': args.timeout})
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
        backend = args.cfg_options.get('env_cfg.dist_cfg.backend')
        if backend is not None and 'accelerator.backend' not in args.cfg_options:
            # It wins over the backend that a base config forces.
            cfg.merge_from_dict({'accelerator.backend': backend})
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    refuse_flexible_runner(cfg)
    return cfg


def load_complete_config(args: argparse.Namespace, names: Sequence[str]) -> Config:
    """Check the launch variables, load a config, and refuse one that lacks keys of some names."""
    env = check_launch_variables(args)
    BriefTerminal.wanted = not args.verbose
    cfg = load_config(args)
    if env.rank == 0:
        for line in find_unread(cfg, args.cfg_options or {}):
            say(line)
    missing = [name for name in names if cfg.get(name) is None]
    if missing:
        raise DevPlugError(
            f'CONFIG {args.config!r} has no {", ".join(missing)}; expected {", ".join(names)}. '
            f'Add what is missing, or inherit it with _base_.'
        )
    if isinstance(cfg.model, dict) and not cfg.model.get('type'):
        raise DevPlugError(
            f'CONFIG {args.config!r}: model has no type; expected model=dict(type=..., ...). Name '
            f'the class of the model, or inherit the rest of it with _base_.'
        )
    _check_work_dir(cfg.work_dir)
    return cfg


def _check_work_dir(folder: str) -> None:
    """Refuse a work directory that cannot be made or written to."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DevPlugError(
            f'work_dir={folder!r}: {error.strerror}. Checkpoints and logs are written there: '
            f'expected a folder that can be written to. Name another: --work-dir FOLDER.'
        ) from error


def check_checkpoint(path: str, origin: str) -> None:
    """Refuse a path without a file; addresses are left to MMEngine's file backends."""
    if re.match(r'\w+://', path) is not None:
        return
    if not Path(path).expanduser().is_file():
        found = 'is a directory' if Path(path).expanduser().is_dir() else 'can not be found'
        newest = '; --resume without one takes the newest of the work directory'
        newest = newest if origin == '--resume' else ''
        raise CheckpointError(
            f'{origin} {path!r} {found}: expected the path of a checkpoint, or an '
            f'address such as https://... Correct the path{newest}.'
        )


def check_launch_variables(args: argparse.Namespace) -> LaunchEnv:
    """Read the launch variables before anything else does, and ignore an earlier job's."""
    forget_stale_variables(args.launcher)
    if args.local_rank is not None:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return read_launch_env(args.launcher)


def run(main: Callable[[Optional[List[str]]], None], argv: Optional[List[str]] = None) -> int:
    """Run a script; our errors end it with status 1 and one message instead of a traceback."""
    end_with_mim()
    # By MMEngine, and by each repository, in each process.
    warnings.filterwarnings('ignore', 'pkg_resources is deprecated')
    try:
        main(argv)
    except KeyboardInterrupt:
        say('ended by SIGINT.')
        return 128 + signal.SIGINT
    except Exception as found:
        error: Exception = found
        if not isinstance(error, DevPlugError):
            from mmdevplug.checks.config_errors import explain_config

            # A package that cannot be imported raises errors of any kind.
            problem = explain_import(error) or explain_config(error)
            if problem is None:
                raise
            error = DevPlugError(str(problem))
        note_for_agent(error)
        brief = getattr(error, 'brief', None)  # another rank of this host prints it all
        text, note = f'{type(error).__name__}: {brief or error}', note_path()
        if note is None or says_first(text, Path(note).parents[1]):
            say(text)
        return 1
    return 0
