"""What the runner fills into a config, and how a base config is laid over any config."""

import copy
from typing import Any, Dict, Mapping, Optional, Union

from mmengine.config import Config, ConfigDict

ConfigType = Union[Dict, Config, ConfigDict]


def prepare_config(cfg: ConfigType) -> ConfigType:
    """Complete a config for :class:`DeviceRunner`.

    Args:
        cfg (dict or Config): Left as it is.

    Returns:
        dict or Config: A copy in which mmdevplug is imported, so that the config that the runner
        dumps can be used by itself, and in which an absent ``env_cfg`` asks for no backend.
    """
    cfg = copy.deepcopy(cfg)
    cfg['custom_imports'] = _with_import(cfg.get('custom_imports'), 'mmdevplug')
    if cfg.get('env_cfg') is None:
        cfg['env_cfg'] = {}
    return cfg


def _with_import(custom_imports: Optional[Mapping[str, Any]], package: str) -> Dict[str, Any]:
    found = dict(custom_imports or dict(allow_failed_imports=False))
    imports = found.get('imports') or []
    imports = [imports] if isinstance(imports, str) else list(imports)
    if not any(name.split('.')[0] == package for name in imports):
        imports.append(package)
    found['imports'] = imports
    return found
