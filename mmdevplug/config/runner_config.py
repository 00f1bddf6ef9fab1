"""Complete a config for :class:`DeviceRunner`."""

import copy
from difflib import get_close_matches
from typing import Dict, Union

from mmengine.config import Config, ConfigDict
from mmengine.utils import import_modules_from_strings

from mmdevplug.errors import DevPlugError

#: Keys of ours in a config, and keys of MMEngine's that decide how it trains.
OURS = (
    *('accelerator', 'checkpoint_classes', 'model_parallel', 'sharding'),
    *('find_unused_parameters', 'model_wrapper_cfg', 'runner_type', 'sync_bn'),
)
#: Keys of a config that MMEngine's runner and ours read, and that are no arguments of theirs.
READ_BESIDE = (
    *(*OURS, 'activation_checkpointing', 'compile', 'custom_imports'),
    *('efficient_conv_bn_eval', 'tta_model', 'tta_pipeline'),
)
ConfigType = Union[Dict, Config, ConfigDict]


def prepare_config(cfg: ConfigType) -> ConfigType:
    """Return a copy that imports mmdevplug, and in which an absent ``env_cfg`` names no backend.

    Thus the config that the runner dumps can be used by itself, also in scripts that call
    ``Runner.from_cfg``.
    """
    refuse_flexible_runner(cfg)
    cfg = copy.deepcopy(cfg)
    found = dict(cfg.get('custom_imports') or dict(allow_failed_imports=False))
    imports = found.get('imports') or []
    imports = [imports] if isinstance(imports, str) else list(imports)
    if not any(name.split('.')[0] == 'mmdevplug' for name in imports):
        imports.append('mmdevplug.autopatch')
    cfg['custom_imports'] = dict(found, imports=imports)
    if cfg.get('env_cfg') is None:
        cfg['env_cfg'] = {}
    return cfg


def import_custom_modules(cfg: ConfigType) -> None:
    """Import what ``custom_imports`` names, which MMEngine does for old-style configs alone."""
    if cfg.get('custom_imports'):
        import_modules_from_strings(**cfg['custom_imports'])


def refuse_misspelt(cfg: ConfigType) -> None:
    """Refuse a key that is nearly one of ours: nobody reads it, so another training would run."""
    for key in cfg or ():
        near = get_close_matches(str(key), OURS, n=1, cutoff=0.88)
        if near and key not in READ_BESIDE:
            raise DevPlugError(
                f'the config has the key {key!r}, which nothing reads; did you mean {near[0]!r}? '
                f'Correct it, or choose a name that is less like it.'
            )


def refuse_flexible_runner(cfg: ConfigType) -> None:
    """Refuse a config for MMEngine's FlexibleRunner, which would read none of our options."""
    kind, strategy = cfg.get('runner_type'), cfg.get('strategy')
    if 'FlexibleRunner' in str(kind):
        found = f'runner_type={kind!r}'
    elif strategy is not None:
        found = f'strategy={strategy!r}'
    else:
        return
    raise DevPlugError(
        f"{found} asks for MMEngine's FlexibleRunner, which trains on none of the accelerators of "
        f"mmdevplug: expected runner_type='DeviceRunner' and no key strategy; the key "
        f'sharding shards a model over the ranks.'
    )
