"""Registries, and how the package's parts enter MMEngine's without being imported.

``import mmdevplug`` adds names alone, which keeps it free of torch and of every vendor package.
"""

from importlib import import_module
from typing import Any, Mapping

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


class _WithLazyNames(dict):
    """The classes of one of MMEngine's root registries, and ours, imported when looked up.

    Registries of model repositories read this dict of their parent's, and import nothing for it.
    ``locations`` would not do for that; and all of MMEngine's registries without any share one
    list, whose being empty tells MMEngine to call ``register_all_modules`` of a repository.
    """

    def __init__(self, known: Mapping[str, Any], locations: Mapping[str, str]) -> None:
        super().__init__(known)
        self._locations = locations

    def __contains__(self, name: object) -> bool:
        known = super().__contains__
        if not known(name) and name in self._locations:
            import_module(self._locations[name])  # type: ignore[index]
        return known(name)

    def __missing__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise KeyError(name)


def register_lazily(registry: Registry, location: str, *names: str) -> None:
    """Let one of MMEngine's root registries know names that a module registers when imported."""
    locations = dict.fromkeys(names, location)
    registry._module_dict = _WithLazyNames(registry._module_dict, locations)
