"""Read a config: from a file or a package, with what registers its modules, and what is wrong."""

import argparse
import inspect
import re
import traceback
from importlib import import_module
from types import ModuleType
from typing import Any, Iterable, Iterator, Optional

from mmengine import registry
from mmengine.config import Config, DictAction

from mmdevplug.errors import DevPlugError, chain, first_line
from mmdevplug.utils.broken_imports import explain_import

from .accelerator import AcceleratorOptions, to_dict
from .base_config import base_config
from .fields import did_you_mean
from .runner_config import READ_BESIDE, import_custom_modules


def load_file(path: str, import_modules: bool = True) -> Config:
    """Load a config from a path, or from ``package::path`` as in a config's ``_base_``."""
    named = path
    try:
        if '::' in path:
            path, _ = Config._get_cfg_path(path, '')
        cfg = Config.fromfile(path, import_custom_modules=import_modules)
        if import_modules:
            import_custom_modules(cfg)
            if cfg.get('default_scope'):
                _register_modules(cfg.default_scope)
        return cfg
    except Exception as error:
        # A config runs code, which may fail in any way.
        if isinstance(error, DevPlugError) or explain_import(error):
            raise
        # MMEngine replaces errors of imports by others.
        cause = chain(error)[-1] if isinstance(error, ImportError) else error
        if isinstance(cause, ModuleNotFoundError) and cause.name == 'pkg_resources':
            raise DevPlugError(
                f'CONFIG {named!r} cannot be read: MMEngine looks for configs of packages with '
                f'pkg_resources, which setuptools 81 removed. Type: pip install "setuptools<81"'
            ) from error
        frames = list(traceback.walk_tb(cause.__traceback__))
        file, line = frames[-1][0].f_code.co_filename, frames[-1][1]
        if isinstance(cause, SyntaxError):
            read = [each for each, _ in frames if each.f_globals['__name__'] == Config.__module__]
            file, line = read[-1].f_locals.get('filename', path), cause.lineno or 0
        told = f'{type(cause).__name__}: {first_line(cause)}'
        if 'Duplicate key' in told and 'runner_type' in told:
            told += (
                '. Two files of _base_ set it. If one is a base config of mmdevplug, leave it '
                "out, and write accelerator = dict(type='auto') beside your runner_type: our "
                'runner is put under yours.'
            )
        raise DevPlugError(f'CONFIG {named!r} cannot be read: {file}:{line}: {told}') from error


def _register_modules(scope: str) -> None:
    """Register what a repository's registries do not import themselves, as its scripts do."""
    _import_if_there(f'{scope}.registry')
    if scope == 'mmengine':
        return
    own = []
    for root in vars(registry).values():
        child = root._search_child(scope) if isinstance(root, registry.Registry) else None
        if child is not None:
            own.append(bool(child._locations))
    if own and all(own):
        return
    register = getattr(_import_if_there(f'{scope}.utils'), 'register_all_modules', None)
    if register is not None:
        # False instead of its default: the runner sets the default scope itself.
        register(*[False for _ in inspect.signature(register).parameters][:1])


def _import_if_there(name: str) -> Optional[ModuleType]:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not f'{name}.'.startswith(f'{error.name}.'):
            raise  # what it imports is not there
    return None


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
        # Ours is put under a runner of the repository's own.
        cfg[key] = cfg.get(key, value) if key == 'runner_type' else value
    for name in set(AcceleratorOptions.names()) & set(given) - {'backend'}:
        cfg.accelerator.setdefault(name, given[name])  # ours, which suit any accelerator


def find_unread(cfg: Config, keys: Iterable[str]) -> Iterator[str]:
    """Say which options no runner reads: MMEngine takes any, also misspelt ones."""
    runner = import_module('mmengine.runner').Runner  # imported here: training imports it anyway
    read = {*inspect.signature(runner.__init__).parameters, *READ_BESIDE}
    for key in keys:
        name = key.partition('.')[0]
        if name in read:
            continue
        inside = [one for one, value in cfg.items() if isinstance(value, dict) and name in value]
        meant = f"; did you mean '{inside[0]}.{key}'?" if inside else did_you_mean([name], read)
        yield (
            f'--cfg-options {key}: no runner reads {name!r}. It is new, or a variable whose value '
            f'the config file has used already{meant}'
        )


class KeyValueAction(DictAction):
    """MMEngine's ``key=value`` options, which refuse what cannot be read.

    MMEngine's parser takes ``dict(type='X')`` for a string, and ends in a RecursionError where the
    dict has several keys.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # texts; argparse has a wider type
        option_string: Optional[str] = None,
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
