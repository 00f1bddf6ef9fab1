"""Check that the types that a config names are registered."""

import difflib
import re
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence

from mmengine import registry as mm
from mmengine.config import Config
from mmengine.registry import Registry

from mmdevplug.explanations.versions import Problem, broken_packages, explain_import
from mmdevplug.model import prepare

from .findings import Finding, Section

section = Section('config')

#: The registries with which MMEngine's runner builds these keys.
TOP_LEVEL = {
    'model': mm.MODELS,
    'model_wrapper_cfg': mm.MODEL_WRAPPERS,
    'optim_wrapper': mm.OPTIM_WRAPPERS,
    'param_scheduler': mm.PARAM_SCHEDULERS,
    'train_dataloader': None,
    'val_dataloader': None,
    'test_dataloader': None,
    'train_cfg': mm.LOOPS,
    'val_cfg': mm.LOOPS,
    'test_cfg': mm.LOOPS,
    'val_evaluator': mm.METRICS,
    'test_evaluator': mm.METRICS,
    'default_hooks': mm.HOOKS,
    'custom_hooks': mm.HOOKS,
    'visualizer': mm.VISUALIZERS,
    'log_processor': mm.LOG_PROCESSORS,
    'strategy': mm.STRATEGIES,
}

#: The registries of keys inside of these but the model, at any depth.
INSIDE = {
    'optimizer': mm.OPTIMIZERS,
    'dataset': mm.DATASETS,
    'datasets': mm.DATASETS,
    'sampler': mm.DATA_SAMPLERS,
    'batch_sampler': mm.DATA_SAMPLERS,
    'collate_fn': mm.FUNCTIONS,
    'pipeline': mm.TRANSFORMS,
    'vis_backends': mm.VISBACKENDS,
}

#: Keys whose `type` is no registered name.
OWN_WORDS = ('clip_grad', 'grad_compression', 'backend_args', 'file_client_args', 'paramwise_cfg')

#: The registries of a part of a model whose builder is not known.
ANYWHERE = (
    mm.MODELS,
    mm.WEIGHT_INITIALIZERS,
    mm.TASK_UTILS,
    mm.TRANSFORMS,
    mm.DATASETS,
    mm.FUNCTIONS,
    mm.METRICS,
)


class Named(NamedTuple):
    """A type that a config names, its key, and where it is looked up."""

    path: str  # e.g. 'model.backbone.type'
    name: str
    registry: Optional[Registry]  # None if it is not known
    scope: Optional[str]  # `_scope_` of the dict


def names_in(cfg: Config) -> Iterator[Named]:
    """Yield all types that a runner or what it builds looks up by name."""
    for key, registry in TOP_LEVEL.items():
        yield from _walk(cfg.get(key), key, registry, None)
    wrapper = cfg.get('optim_wrapper')
    if isinstance(wrapper, dict) and isinstance(wrapper.get('constructor'), str):
        path, registry = 'optim_wrapper.constructor', mm.OPTIM_WRAPPER_CONSTRUCTORS
        yield Named(path, wrapper['constructor'], registry, None)
    if isinstance(cfg.get('runner_type'), str):
        yield Named('runner_type', cfg.runner_type, mm.RUNNERS, None)


def _walk(
    value: Any, path: str, registry: Optional[Registry], scope: Optional[str]
) -> Iterator[Named]:
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _walk(item, f'{path}[{number}]', registry, scope)
    if not isinstance(value, dict):
        return
    scope = value.get('_scope_', scope)
    if isinstance(value.get('type'), str):
        yield Named(f'{path}.type', value['type'], registry, scope)
    # A dict without a type holds several of its kind, such as default_hooks.
    kept = None if 'type' in value or path in ('model', 'optim_wrapper') else registry
    # A model's `sampler` is mmdet's, which picks boxes, and no sampler of a data loader.
    inside = {} if path.split('.')[0] == 'model' else INSIDE
    for key, item in value.items():
        if key not in OWN_WORDS and key != 'type':
            yield from _walk(item, f'{path}.{key}', inside.get(key, kept), scope)


def examine(cfg: Config) -> Iterator[Finding]:
    """Look up all names of a config whose default scope is set."""
    for named in names_in(cfg):
        if named.path == 'model_wrapper_cfg.type' and named.name in prepare.REPLACED_BY:
            continue
        problem = _problem(named)
        if problem is not None:
            yield _unknown(named, problem, cfg)


def _problem(named: Named) -> Optional[Problem]:
    """What is wrong with a name, None if it is registered; with a command if that is known."""
    registries: Sequence[Registry] = ANYWHERE if named.registry is None else (named.registry,)
    if named.registry is mm.METRICS:
        registries = (mm.METRICS, mm.EVALUATOR)
    problem = 'it is not registered'
    for registry in registries:
        try:
            with registry.switch_scope_and_registry(named.scope) as found:
                if found.get(named.name) is not None:
                    return None
        except Exception as error:
            # A package registers its parts by imports, which may fail in any way. MMEngine itself
            # raises for the path of a module that does not exist.
            for why in explain_import(error):
                return why
            if str(error) != f'Failed to get {named.name}':
                problem = f'looking it up fails with {type(error).__name__}: {error}'
    broken = broken_packages(named.name.rpartition('.')[0].partition('.')[0], named.scope)
    return broken[0] if broken else Problem(problem, '')


def _unknown(named: Named, wrong: Problem, cfg: Config) -> Finding:
    problem = wrong.what
    level, why = 'error', 'the job stops when it is built.'
    scope, _, name = named.name.rpartition('.')
    known: Dict[str, None] = {}
    for registry in ANYWHERE if named.registry is None else (named.registry,):
        _collect_names(registry.root, known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    close = [f'{scope}.{found}' if scope else found for found in close]
    place = _place_of(named.name, cfg)
    found = f'{named.path}={named.name!r}: {problem}{f" ({place})" if place else ""}'
    if named.registry is None:
        level, why = 'warning', 'what builds it may know the name; if not, the job stops there.'
    else:
        found += f'; searched among {named.registry.name}s'
    remedy = (
        "custom_imports = dict(imports=['MODULE_THAT_REGISTERS_IT'], allow_failed_imports=False)"
    )
    if wrong.command:
        remedy = wrong.command  # What a package that cannot be imported registers is not known.
    elif close:
        found += f'; similar: {", ".join(close)}'
        remedy = f'{named.path} = {close[0]!r}'
    data = dict(path=named.path, name=named.name, close=close)
    return section.finding(level, found, why, remedy, data)


def _collect_names(registry: Registry, names: Dict[str, None]) -> None:
    names.update(dict.fromkeys(registry.module_dict))
    for child in registry.children.values():
        _collect_names(child, names)


def _place_of(name: str, cfg: Config) -> str:
    """Find the file and line where a config names something; empty if it is in no file."""
    file, line, quoted = '', 0, re.compile(f'[\'"]{re.escape(name)}[\'"]')
    for text in (cfg.text or '').splitlines():
        if text.endswith(('.py', '.yml', '.yaml', '.json')) and Path(text).is_file():
            file, line = text, 0
            continue
        line += 1
        if file and quoted.search(text):
            return f'{file}:{line}'
    return ''


def scope_problem(scope: str) -> str:
    """Say why a default scope cannot be used; empty if it can."""
    try:
        import_module(f'{scope}.registry')
    except ModuleNotFoundError as error:
        registered = any(
            scope in one.children for one in (mm.MODELS, mm.DATASETS, mm.HOOKS, mm.TRANSFORMS)
        )
        if error.name in (scope, f'{scope}.registry') and registered:
            return ''  # registries of a config's custom_imports
        return f'{type(error).__name__}: {error}'
    except Exception as error:
        return f'import {scope}.registry fails with {type(error).__name__}: {error}'
    return ''
