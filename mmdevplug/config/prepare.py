"""Complete a config for :class:`DeviceRunner`."""

import copy
from typing import Dict, Union

from mmengine.config import Config, ConfigDict

from mmdevplug.errors import DevPlugError

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
