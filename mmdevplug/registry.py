"""Registries, and how the package's parts enter MMEngine's without being imported.

MMEngine's registries import their ``locations`` at the first look-up. Adding ours to that list
keeps ``import mmdevplug`` free of torch and of every vendor package.
"""

from importlib import import_module
from typing import Any, List, Mapping

try:
    from mmengine.registry import Registry, build_from_cfg
except ModuleNotFoundError as error:
    if error.name != 'mmengine':
        raise
    from .utils.plain_registry import Registry, build_from_cfg

SCOPE = 'mmdevplug'


def _build_accelerator(cfg: Mapping[str, Any], registry: Registry) -> Any:
    """Build here, whatever ``default_scope`` the config has: MMEngine warns of any other."""
    return build_from_cfg(dict(cfg, _scope_=SCOPE), registry)


ACCELERATORS = Registry(
    'accelerator', build_func=_build_accelerator, scope=SCOPE, locations=['mmdevplug.accelerators']
)


_lazy: List[Registry] = []


def register_lazily(registry: Registry, location: str) -> None:
    """Let one of MMEngine's root registries import a module, which registers, when first used."""
    _lazy.append(registry)
    if registry._imported:
        # The list of locations was read already, so torch is loaded and an import costs little.
        import_module(location)
    elif location not in registry._locations:
        registry._locations.append(location)


def import_parts() -> None:
    """Import what was registered lazily.

    Another repository's registry looks for a name in MMEngine's, but imports only its own modules.
    """
    for registry in _lazy:
        registry.import_from_location()
