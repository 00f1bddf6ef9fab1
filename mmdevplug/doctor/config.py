"""Section *config*: whether a config can be loaded, built and trained here. Nothing is trained."""

import sys
import traceback
from types import TracebackType
from typing import Any, Callable, Dict, Iterator, List, Optional

from mmengine.config import Config
from mmengine.registry import DefaultScope

from mmdevplug.accelerators import Accelerator, choose_accelerator
from mmdevplug.errors import DevPlugError

from . import config_model, config_names, config_values
from .findings import Finding
from .isolated import Death, run_isolated
from .request import Setting

SECTION = 'config'
STEP_SECONDS = 300.0


def examine(
    options: Dict[str, Any], ranks: int = 1, seconds: float = STEP_SECONDS
) -> List[Finding]:
    """Look at a config, in a process of its own: loading one imports what it names.

    Args:
        options (dict): Fields of :class:`mmdevplug.doctor.request.Setting`.
        ranks (int): How many processes would train. Defaults to 1.
        seconds (float): How long a step may take before it counts as hanging.
    """
    tasks = [options['config']]
    found = run_isolated(__name__, tasks, dict(options, ranks=ranks), seconds)
    return [_died(told) if isinstance(told, Death) else told for told in found]


def work(task: str, options: Dict[str, Any], say: Callable[[str], None]) -> Iterator[Finding]:
    """Look at one config; see :mod:`mmdevplug.doctor.isolated`."""
    ranks = options.pop('ranks')
    setting = Setting(**options)
    say('loading the config')
    try:
        cfg = setting.load()
    except Exception as error:
        yield _cannot_load(task, error)
        return
    yield Finding(SECTION, 'ok', f'{task} can be loaded', data=dict(config=task))
    cfg.setdefault('accelerator', dict(type='auto', backend='auto'))  # as `mmdevplug train` does
    say('setting the default scope')
    yield from _set_scope(cfg)
    say('looking up names')
    unknown = list(config_names.examine(cfg))
    say('choosing the accelerator')
    accelerator = None
    try:
        accelerator = choose_accelerator(setting.options(cfg).device).accelerator
    except DevPlugError as error:
        yield Finding(
            SECTION,
            'error',
            f'accelerator: {error}',
            'the job stops before it begins.',
            "accelerator = dict(type='auto', backend='auto')",
        )
    say('looking at values')
    yield from config_values.examine(cfg, accelerator, ranks)
    say('building the model')
    built = yield from _examine_model(cfg, accelerator, ranks)
    # What a model that can be built calls by a name of its own is none of a registry.
    yield from (f for f in unknown if f.level == 'error' or not built)
    if not any(finding.level == 'error' for finding in unknown):
        yield Finding(SECTION, 'ok', 'all types in the config are registered')


def _examine_model(
    cfg: Config, accelerator: Optional[Accelerator], ranks: int
) -> Iterator[Finding]:
    built = False
    for finding in config_model.examine(cfg, accelerator, ranks):
        built = built or bool(finding.data and 'parameters' in finding.data)
        yield finding
    return built  # noqa: B901  the value of `yield from`


def _set_scope(cfg: Config) -> Iterator[Finding]:
    scope = cfg.get('default_scope') or 'mmengine'
    DefaultScope.get_instance('mmdevplug-doctor', scope_name=scope)
    if scope == 'mmengine':
        return
    problem = config_names.scope_problem(scope)
    if problem:
        yield Finding(
            SECTION,
            'error',
            f'default_scope={scope!r}: {problem}',
            'the types of the config are looked up in that package.',
            f'{sys.executable} -c "import {scope}"  # then install it or mend what it names',
        )


def _cannot_load(path: str, error: Exception) -> Finding:
    where = _place_in_config(path, error)
    return Finding(
        SECTION,
        'error',
        f'{where}: {type(error).__name__}: {error}',
        'the config cannot be loaded.',
        f'{sys.executable} -c "from mmengine.config import Config; Config.fromfile({path!r})"',
    )


def _place_in_config(path: str, error: BaseException) -> str:
    """The file and line of a config that an error comes from, its own path if that is not told."""
    own = sys.modules['mmengine.config.config'].__file__
    place = path
    loading: Optional[str] = None
    for frame, line in _frames(error.__traceback__):
        code = frame.f_code
        if code.co_filename == own and code.co_name == '_file2dict':
            loading = frame.f_locals.get('filename', loading)
            place = str(loading)
        elif loading is not None and code.co_filename == loading:
            place = f'{loading}:{line}'
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f'{loading or path}:{error.lineno}'
    return place


def _frames(trace: Optional[TracebackType]) -> Iterator[Any]:
    return traceback.walk_tb(trace)


def _died(death: Death) -> Finding:
    return Finding(
        SECTION,
        'error',
        death.describe(),
        'a training with this config would end there, too.',
        f'{sys.executable} -X faulthandler -c "from mmengine.config import Config; '
        f'Config.fromfile({death.task!r})"',
    )
