"""What accelerators need of MMEngine's registry, where MMEngine is not installed."""

from importlib import import_module
from typing import Any, Callable, Dict, Mapping, Optional, Sequence


class Registry:
    """Names of classes, which register with a decorator; arguments are those of MMEngine's."""

    def __init__(
        self, name: str, build_func: Callable, scope: str, locations: Sequence[str] = ()
    ) -> None:
        self.name, self.scope, self._locations = name, scope, locations
        self._build = build_func
        self._classes: Dict[str, Callable] = {}

    @property
    def module_dict(self) -> Dict[str, Callable]:
        """The registered classes by name."""
        return self._classes

    def register_module(
        self, name: Optional[str] = None, force: bool = False, module: Optional[Callable] = None
    ) -> Callable:
        """Register a class or a function, as a decorator or with ``module``.

        Raises:
            KeyError: If another one has the name, without ``force``.
        """
        if module is None:
            return lambda found: self.register_module(name, force, found)
        known = self._classes.setdefault(name or module.__name__, module)
        if known is not module and not force:
            raise KeyError(f'{name or module.__name__} is already registered in {self.name}')
        self._classes[name or module.__name__] = module
        return module

    def get(self, name: str) -> Optional[Callable]:
        """Return what is registered by a name, None if there is nothing."""
        for location in self._locations:
            import_module(location)
        return self._classes.get(name)

    def build(self, cfg: Mapping[str, Any]) -> Any:
        """Build an object from a dict with its ``type`` and its arguments."""
        return self._build(cfg, registry=self)


def build_from_cfg(cfg: Mapping[str, Any], registry: Registry) -> Any:
    """Build an object from a dict with its ``type``, a name or a class, and its arguments."""
    arguments = {key: value for key, value in cfg.items() if key not in ('type', '_scope_')}
    kind = cfg['type']
    found = registry.get(kind) if isinstance(kind, str) else kind
    if found is None:
        raise KeyError(f'{kind} is not in the {registry.name} registry')
    return found(**arguments)
