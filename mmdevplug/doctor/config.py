"""Section *config*: whether a config can be loaded, built and trained here.

Nothing is trained but one step, for a job of several ranks.
"""

import sys
from typing import Any, Callable, Dict, Iterator, List

from mmengine.config import Config
from mmengine.registry import DefaultScope

from mmdevplug.accelerators import choose_accelerator
from mmdevplug.errors import DevPlugError
from mmdevplug.explanations.configs import place_in_config, refuse_script

from . import config_model, config_names, config_values, one_step
from .accelerators import accelerator_options
from .findings import Finding, Section
from .isolated import Death, run_isolated

section = Section('config')
STEP_SECONDS = 300.0


def examine(
    options: Dict[str, Any], ranks: int = 1, seconds: float = STEP_SECONDS
) -> List[Finding]:
    """Examine a config in a separate process: loading it imports what it names."""
    config, findings = options['config'], []
    for found in run_isolated(__name__, [config], dict(options, ranks=ranks), seconds):
        if isinstance(found, Death):
            found = section.error(
                found.describe(),
                'a training with this config would end there, too.',
                f'{sys.executable} -X faulthandler -c "from mmengine.config import Config; '
                f'Config.fromfile({config!r})"',
            )
        findings.append(found)
    return findings


def work(task: str, options: Dict[str, Any], say: Callable[[str], None]) -> Iterator[Finding]:
    """Examine one config; see :mod:`mmdevplug.doctor.isolated`."""
    ranks = options['ranks']
    say('loading the config')
    try:
        refuse_script(task)
        cfg = Config.fromfile(task)
    except Exception as error:
        yield section.error(
            f'{place_in_config(task, error)}: {type(error).__name__}: {error}',
            'the config cannot be loaded.',
            f'{sys.executable} -c "from mmengine.config import Config; Config.fromfile({task!r})"',
        )
        return
    yield section.ok(f'{task} can be loaded', data=dict(config=task))
    cfg.setdefault('accelerator', dict(type='auto', backend='auto'))  # as `mmdevplug train` does
    say('setting the default scope')
    scope = cfg.get('default_scope') or 'mmengine'
    DefaultScope.get_instance('mmdevplug-doctor', scope_name=scope)
    problem = '' if scope == 'mmengine' else config_names.scope_problem(scope)
    if problem:
        yield section.error(
            f'default_scope={scope!r}: {problem}',
            'the types of the config are looked up in that package.',
            f'{sys.executable} -c "import {scope}"  # then install it or repair what it names',
        )
    say('looking up names')
    unknown = list(config_names.examine(cfg))
    say('choosing the accelerator')
    accelerator = None
    try:
        device = accelerator_options(cfg, options['accelerator']).device
        accelerator = choose_accelerator(device).accelerator
    except DevPlugError as error:
        yield section.error(
            f'accelerator: {error}',
            'the job stops before it begins.',
            "accelerator = dict(type='auto', backend='auto')",
        )
    say('checking values')
    yield from config_values.examine(cfg, accelerator, ranks)
    say('building the model')
    model = list(config_model.examine(cfg, accelerator, ranks))
    yield from model
    failed = any(finding.level == 'error' for finding in [*unknown, *model])
    if accelerator is not None and not failed:
        say('training one step')
        yield from one_step.examine(cfg, accelerator, ranks)
    # Names without a registry are no mistakes if the model can be built with them.
    built = any('parameters' in (finding.data or {}) for finding in model)
    yield from (finding for finding in unknown if finding.level == 'error' or not built)
    if not any(finding.level == 'error' for finding in unknown):
        yield section.ok('all types in the config are registered')
