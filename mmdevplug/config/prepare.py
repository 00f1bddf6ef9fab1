"""Complete a config for :class:`DeviceRunner`."""

import copy
from typing import Dict, Union

from mmengine.config import Config, ConfigDict

ConfigType = Union[Dict, Config, ConfigDict]


def prepare_config(cfg: ConfigType) -> ConfigType:
    """Return a copy that imports mmdevplug, and in which an absent ``env_cfg`` names no backend.

    Thus the config that the runner dumps can be used by itself, also in scripts that call
    ``Runner.from_cfg``.
    """
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
