"""Arguments and steps that the training and the testing script share."""

import argparse
import hashlib
import inspect
import os
import re
import signal
import sys
import traceback
import warnings
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence

from mmengine import registry
from mmengine.config import Config, DictAction, config as config_module
from mmengine.config.utils import MODULE2PACKAGE

from mmdevplug.checks.versions import explain_import, explain_versions, folder_of
from mmdevplug.config.accelerator import AcceleratorOptions, to_dict
from mmdevplug.config.base_config import base_config
from mmdevplug.config.fields import did_you_mean
from mmdevplug.config.prepare import refuse_flexible_runner
from mmdevplug.environments.launch_variables import (
    LAUNCHERS,
    LaunchEnv,
    find_environment,
    forget_stale_variables,
    read_launch_env,
)
from mmdevplug.environments.stale import report_stale
from mmdevplug.environments.torchrun import AGENT
from mmdevplug.errors import CheckpointError, DevPlugError, chain, first_line
from mmdevplug.fault_tolerance.abort import note_for_agent
from mmdevplug.utils.brief_terminal import BriefTerminal
from mmdevplug.utils.patching import LocalPatch, patch_symbol

from . import say
from .forward_signals import end_on_signals, end_with_mim, exit_status
from .rank_server import serve

_is_installed = LocalPatch(config_module, 'is_installed')
_get_installed_path = LocalPatch(config_module, 'get_installed_path')
#: What MMEngine's runner and ours read of a config beside their arguments.
_READ_BESIDE = (
    *('accelerator', 'activation_checkpointing', 'checkpoint_classes', 'compile'),
    *('custom_imports', 'efficient_conv_bn_eval', 'find_unused_parameters', 'model_parallel'),
    *('model_wrapper_cfg', 'runner_type', 'sync_bn', 'tta_model', 'tta_pipeline'),
)
_MODULES = {package: module for module, package in MODULE2PACKAGE.items()}


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
        help='train there, by its base config laid over CONFIG: auto, cpu, cuda, xla, gcu, npu, '
        'mlu, musa, xpu, hpu, mps, tpu, or the name of any other that PyTorch knows',
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


def _warn_of_unread(cfg: Config, keys: Iterable[str]) -> None:
    """Say which options no runner reads: MMEngine takes any, also misspelt ones."""
    runner = import_module('mmengine.runner').Runner  # which a start that trains needs in any case
    read = {*inspect.signature(runner.__init__).parameters, *_READ_BESIDE}
    for key in keys:
        name = key.partition('.')[0]
        if name in read:
            continue
        inside = [one for one, value in cfg.items() if isinstance(value, dict) and name in value]
        meant = f"; did you mean '{inside[0]}.{key}'?" if inside else did_you_mean([name], read)
        say(
            f'--cfg-options {key}: no runner reads {name!r}. It is new, or a variable whose value '
            f'the config file has used already{meant}'
        )


def load_complete_config(args: argparse.Namespace, names: Sequence[str]) -> Config:
    """Check the launch variables, load a config, and refuse one that lacks keys of some names."""
    env = check_launch_variables(args)
    BriefTerminal.wanted = not args.verbose
    cfg = load_config(args)
    if env.rank == 0:
        _warn_of_unread(cfg, args.cfg_options or {})
    missing = [name for name in names if cfg.get(name) is None]
    if missing:
        raise DevPlugError(
            f'CONFIG {args.config!r} has no {", ".join(missing)}; expected {", ".join(names)}. '
            f'Add what is missing, or inherit it with _base_.'
        )
    return cfg


def check_checkpoint(path: str, origin: str) -> None:
    """Refuse a path without a file; addresses are left to MMEngine's file backends."""
    if re.match(r'\w+://', path) is not None:
        return
    if not Path(path).expanduser().is_file():
        found = 'is a directory' if Path(path).expanduser().is_dir() else 'can not be found'
        raise CheckpointError(
            f'{origin} {path!r} {found}: expected the path of a checkpoint, or an '
            f'address such as https://... Correct the path; --resume without one takes the newest '
            f'of the work directory.'
        )


def load_file(path: str, import_modules: bool = True) -> Config:
    """Load a config from a path, or from ``package::path`` as in a config's ``_base_``."""
    named = path
    try:
        with _packages_found():
            if '::' in path:
                path, _ = Config._get_cfg_path(path, '')
            cfg = Config.fromfile(path, import_custom_modules=import_modules)
        if import_modules and cfg.get('default_scope'):
            _register_modules(cfg.default_scope)
        return cfg
    except Exception as error:
        # A config runs code, which may fail in any way.
        if isinstance(error, DevPlugError) or explain_import(error):
            raise
        # MMEngine replaces errors of imports by others.
        cause = chain(error)[-1] if isinstance(error, ImportError) else error
        frames = list(traceback.walk_tb(cause.__traceback__))
        file, line = frames[-1][0].f_code.co_filename, frames[-1][1]
        if isinstance(cause, SyntaxError):
            read = [each for each, _ in frames if each.f_globals['__name__'] == Config.__module__]
            file, line = read[-1].f_locals.get('filename', path), cause.lineno
        raise DevPlugError(
            f'CONFIG {named!r} cannot be read: {file}:{line}: {type(cause).__name__}: '
            f'{first_line(cause)}'
        ) from error


def _register_modules(scope: str) -> None:
    """Register what a repository's registries do not import themselves, as its scripts do."""
    _import_if_there(f'{scope}.registry')
    roots = [one for one in vars(registry).values() if isinstance(one, registry.Registry)]
    own = [each for each in (one._search_child(scope) for one in roots) if each is not None]
    if scope == 'mmengine' or (own and all(one._locations for one in own)):
        return
    register = getattr(_import_if_there(f'{scope}.utils'), 'register_all_modules', None)
    if register is not None:
        # In place of its default, True: without changing the default scope, which the runner does.
        register(*[False for _ in inspect.signature(register).parameters][:1])


def _import_if_there(name: str) -> Optional[ModuleType]:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not f'{name}.'.startswith(f'{error.name}.'):
            raise  # what it imports is not there
    return None


@contextmanager
def _packages_found() -> Iterator[None]:
    """Find the packages of ``mmseg::pspnet/...`` where MMEngine does not.

    It looks for them with pkg_resources, which setuptools has no longer since release 81.
    """
    if find_spec('pkg_resources') is not None:
        yield
        return
    with _is_installed(lambda _, package: _folder(package) is not None):
        with _get_installed_path(_installed_path):
            yield


def _folder(package: str) -> Optional[str]:
    """The folder of a package, by the name of its distribution or its module."""
    return folder_of(_MODULES.get(package, package))


def _installed_path(_: Any, package: str) -> str:
    folder = _folder(package)
    if folder is None:
        raise ModuleNotFoundError(
            f'the config names the package {package!r}, which is not installed; install it, or '
            f'give the path of a file.'
        )
    return folder


class KeyValueAction(DictAction):
    """MMEngine's ``key=value`` options, which refuse what cannot be read.

    MMEngine's parser takes ``dict(type='X')`` for a string, and ends in a RecursionError where the
    dict has several keys.
    """

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: Any = None
    ) -> None:
        for text in values or []:
            try:
                super().__call__(parser, namespace, [text], option_string)
                if re.search(r'(=|[\[(,]\s*)(dict\(|\{\s*[\'"]?\w+[\'"]?\s*:)', text):
                    raise ValueError(text)
            except (RecursionError, ValueError, AssertionError):
                raise argparse.ArgumentError(
                    self,
                    f'cannot read {text!r}; expected key=value with a word, a number, or a list '
                    f'or tuple of such: key=[a,b]. Write dicts into a config that inherits this '
                    f'one, or set their keys one by one: key.name=value.',
                ) from None


def overlay_accelerator(cfg: Config, name: str) -> None:
    """Lay the base config of an accelerator over a config, which is changed in place."""
    try:
        base = Config.fromfile(base_config(name))
    except DevPlugError:
        # An accelerator without a file of its own; an unknown name is refused by the runner.
        base = Config.fromfile(base_config('auto'))
        base.accelerator.type = name
    given = to_dict(cfg.get('accelerator'))
    for key, value in base.items():
        cfg[key] = value
    for name in set(AcceleratorOptions.names()) & set(given) - {'backend'}:
        cfg.accelerator.setdefault(name, given[name])  # ours, which suit any accelerator


def check_launch_variables(args: argparse.Namespace) -> LaunchEnv:
    """Read the launch variables before anything else does, and ignore an earlier job's."""
    of_pod = find_environment().per_host
    stale = forget_stale_variables(args.launcher)
    if not of_pod:
        report_stale(args.launcher, stale, say)
    if args.local_rank is not None:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return read_launch_env(args.launcher)


def run(main: Callable[[Optional[List[str]]], None], argv: Optional[List[str]] = None) -> int:
    """Run a script; our errors end it with status 1 and one message instead of a traceback."""
    # By MMEngine, and by each repository, in each process.
    warnings.filterwarnings('ignore', 'pkg_resources is deprecated')
    checked = serve()
    if checked is not None:
        main, argv = import_module('mmdevplug.cli.launch').main, checked
    elif AGENT in os.environ and '--verbose' not in (sys.argv if argv is None else argv):
        _show_warnings_once()
    end_on_signals()
    end_with_mim()
    try:
        with explain_versions():
            main(argv)
    except KeyboardInterrupt:
        say('ended by SIGINT.')
        return exit_status(signal.SIGINT)
    except DevPlugError as error:
        note_for_agent(error)
        text = getattr(error, 'brief', None) or error  # another rank of this host prints it all
        say(f'{type(error).__name__}: {text}')
        return 1
    return 0


def _show_warnings_once() -> None:
    """Show a warning of Python on the first rank of this host that issues it, and on no other."""
    file = os.environ.get('TORCHELASTIC_ERROR_FILE')
    if file is None:
        return
    folder = Path(file).parents[1]  # the job's, on this host, since the last restart
    show, shown = warnings.showwarning, set()

    def show_first(
        message: Any, category: Any, filename: str, lineno: int, *more: Any, **options: Any
    ) -> None:
        text = f'{category.__name__} {filename}:{lineno} {message}'
        if text not in shown:  # a filter may want it more than once
            try:
                (folder / hashlib.sha1(text.encode()).hexdigest()).touch(exist_ok=False)
            except FileExistsError:
                return
            except OSError:  # the agent has ended: rather twice than never
                pass
            shown.add(text)
        show(message, category, filename, lineno, *more, **options)

    patch_symbol(warnings, 'showwarning', show_first)
