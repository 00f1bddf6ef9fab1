"""Whether the types that a config names are registered."""

import difflib
import re
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from mmengine.config import Config
from mmengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    EVALUATOR,
    FUNCTIONS,
    HOOKS,
    LOG_PROCESSORS,
    LOOPS,
    METRICS,
    MODEL_WRAPPERS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    RUNNERS,
    STRATEGIES,
    TASK_UTILS,
    TRANSFORMS,
    VISBACKENDS,
    VISUALIZERS,
    WEIGHT_INITIALIZERS,
    Registry,
)

from mmdevplug.model import prepare

from .findings import Finding

SECTION = 'config'

#: The registries that MMEngine's runner builds these keys with.
TOP_LEVEL = {
    'model': MODELS,
    'model_wrapper_cfg': MODEL_WRAPPERS,
    'optim_wrapper': OPTIM_WRAPPERS,
    'param_scheduler': PARAM_SCHEDULERS,
    'train_dataloader': None,
    'val_dataloader': None,
    'test_dataloader': None,
    'train_cfg': LOOPS,
    'val_cfg': LOOPS,
    'test_cfg': LOOPS,
    'val_evaluator': METRICS,
    'test_evaluator': METRICS,
    'default_hooks': HOOKS,
    'custom_hooks': HOOKS,
    'visualizer': VISUALIZERS,
    'log_processor': LOG_PROCESSORS,
    'strategy': STRATEGIES,
}

#: The registries of keys inside these, wherever they are.
INSIDE = {
    'optimizer': OPTIMIZERS,
    'dataset': DATASETS,
    'datasets': DATASETS,
    'sampler': DATA_SAMPLERS,
    'batch_sampler': DATA_SAMPLERS,
    'collate_fn': FUNCTIONS,
    'pipeline': TRANSFORMS,
    'vis_backends': VISBACKENDS,
}

#: Where `type` is no name of a registry.
OWN_WORDS = ('clip_grad', 'grad_compression', 'backend_args', 'file_client_args', 'paramwise_cfg')

#: What a part of a model may be registered in.
ANYWHERE = (MODELS, WEIGHT_INITIALIZERS, TASK_UTILS, TRANSFORMS, DATASETS, FUNCTIONS, METRICS)

ACCEPTED_TOO = {METRICS: (EVALUATOR,), DATASETS: (), LOOPS: ()}


class Named(NamedTuple):
    """A type that a config names.

    Attributes:
        path (str): Where, e.g. ``'model.backbone.type'``.
        name (str): The name.
        registry (Registry, optional): Where it is looked up; None if the one who reads it decides.
        scope (str, optional): ``_scope_`` of the dict.
    """

    path: str
    name: str
    registry: Optional[Registry]
    scope: Optional[str]


def names_in(cfg: Config) -> Iterator[Named]:
    """All types that a runner or what it builds looks up by name."""
    for key, registry in TOP_LEVEL.items():
        if cfg.get(key) is not None:
            yield from _walk(cfg[key], key, registry, None)
    constructor = _get(cfg.get('optim_wrapper'), 'constructor')
    if isinstance(constructor, str):
        path = 'optim_wrapper.constructor'
        yield Named(path, constructor, OPTIM_WRAPPER_CONSTRUCTORS, None)
    if isinstance(cfg.get('runner_type'), str):
        yield Named('runner_type', cfg.runner_type, RUNNERS, None)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


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
    for key, item in value.items():
        if key not in OWN_WORDS and key != 'type':
            yield from _walk(item, f'{path}.{key}', INSIDE.get(key, kept), scope)


def examine(cfg: Config) -> Iterator[Finding]:
    """Look up all names.

    Args:
        cfg (Config): With its default scope set.
    """
    for named in names_in(cfg):
        if named.path == 'model_wrapper_cfg.type' and named.name in prepare.REPLACED_BY:
            continue
        problem = _problem(named)
        if problem is not None:
            yield _unknown(named, problem, cfg)


def _problem(named: Named) -> Optional[str]:
    """What is wrong with a name, None if it is registered."""
    if named.registry is None:
        registries: Any = ANYWHERE
    else:
        registries = (named.registry, *ACCEPTED_TOO.get(named.registry, ()))
    broken = None
    for registry in registries:
        try:
            if _look_up(registry, named.name, named.scope) is not None:
                return None
        except Exception as error:
            # A package that registers its parts by imports, one of which fails in whatever way.
            broken = f'looking it up fails with {type(error).__name__}: {error}'
    return broken or 'it is not registered'


def _look_up(registry: Registry, name: str, scope: Optional[str]) -> Any:
    with registry.switch_scope_and_registry(scope) as found:
        try:
            return found.get(name)
        except RuntimeError as error:
            if str(error) == f'Failed to get {name}':
                return None  # a path of a module that is not there
            raise


def _unknown(named: Named, problem: str, cfg: Config) -> Finding:
    registry = named.registry
    close = _close_names(named)
    where = place_of(named.name, cfg)
    found = f'{named.path}={named.name!r}: {problem}{f" ({where})" if where else ""}'
    if registry is not None:
        found += f'; looked for among {registry.name}s'
    if close:
        found += f'; close to it: {", ".join(close)}'
    remedy = (
        f'{named.path} = {close[0]!r}'
        if close
        else "custom_imports = dict(imports=['MODULE_THAT_REGISTERS_IT'], "
        'allow_failed_imports=False)'
    )
    return Finding(
        SECTION,
        'warning' if registry is None else 'error',
        found,
        'who builds it may know the word by itself; if not, the job stops there.'
        if registry is None
        else 'the job stops when it is built.',
        remedy,
        dict(path=named.path, name=named.name, close=close),
    )


def _close_names(named: Named) -> List[str]:
    scope, _, name = named.name.rpartition('.')
    close = difflib.get_close_matches(name, _all_names(named.registry), n=3, cutoff=0.5)
    return [f'{scope}.{found}' if scope else found for found in close]


def _all_names(registry: Optional[Registry]) -> List[str]:
    names: Dict[str, None] = {}
    for found in ANYWHERE if registry is None else (registry,):
        _collect(found.root, names)
    return list(names)


def _collect(registry: Registry, names: Dict[str, None]) -> None:
    names.update(dict.fromkeys(registry.module_dict))
    for child in registry.children.values():
        _collect(child, names)


def place_of(name: str, cfg: Config) -> str:
    """The file and line where a config names something, as far as its text tells."""
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
    """Why a default scope cannot be used, empty if it can."""
    try:
        import_module(f'{scope}.registry')
    except ModuleNotFoundError as error:
        if error.name in (scope, f'{scope}.registry') and _registered(scope):
            return ''  # registries of a config's custom_imports
        return f'{type(error).__name__}: {error}'
    except Exception as error:
        return f'import {scope}.registry fails with {type(error).__name__}: {error}'
    return ''


def _registered(scope: str) -> bool:
    return any(scope in registry.children for registry in (MODELS, DATASETS, HOOKS, TRANSFORMS))
