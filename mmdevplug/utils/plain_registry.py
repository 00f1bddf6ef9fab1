"""Replace MMEngine's registry for accelerators where MMEngine is not installed."""

from typing import Any, Callable, Dict, Mapping, Optional


class Registry:
    """Names of classes, which register with a decorator; arguments are those of MMEngine's."""

    def __init__(self, name: str, build_func: Callable, scope: str) -> None:
        self.name, self.scope, self._build = name, scope, build_func
        self._module_dict: Dict[str, Callable] = {}

    @property
    def module_dict(self) -> Dict[str, Callable]:
        """The registered classes by name."""
        return self._module_dict

    def register_module(
        self, name: Optional[str] = None, force: bool = False, module: Optional[Callable] = None
    ) -> Callable:
        """Register a class or a function, as a decorator or with ``module``.

        Raises:
            KeyError: If another one has the name, without ``force``.
        """
        if module is None:
            return lambda found: self.register_module(name, force, found)
        name = name or module.__name__
        if not force and name in self._module_dict:
            raise KeyError(f'{name} is already registered in {self.name}')
        self._module_dict[name] = module
        return module

    def get(self, name: str) -> Optional[Callable]:
        """Return what is registered by a name, None if there is nothing."""
        if name not in self._module_dict:  # a table that imports answers this, and get() not
            return None
        return self._module_dict[name]

    def build(self, cfg: Mapping[str, object]) -> object:
        """Build an object from a dict with its ``type`` and its arguments."""
        return self._build(cfg, registry=self)


def build_from_cfg(cfg: Mapping[str, Any], registry: Registry) -> object:
    """Build an object from a dict with its ``type``, a name or a class, and its arguments."""
    arguments = {key: value for key, value in cfg.items() if key not in ('type', '_scope_')}
    kind = cfg['type']
    found = registry.get(kind) if isinstance(kind, str) else kind
    if found is None:
        raise KeyError(f'{kind} is not in the {registry.name} registry')
    return found(**arguments)
