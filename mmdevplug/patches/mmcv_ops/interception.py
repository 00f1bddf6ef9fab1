"""Calling the functions of ``mmcv._ext`` through others, without editing mmcv.

All modules of ``mmcv.ops`` hold the extension module itself and look a function up at each call,
so its attributes are the narrowest place for this. If mmcv is not imported yet, as before a runner
has built its model, they are replaced right after the import; mmcv is not imported for it, and
without the extension nothing ever happens.
"""

import sys
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence

from mmdevplug.utils.patching import Patch, patch_symbol

EXTENSION = 'mmcv._ext'
Handler = Callable[[Callable, Sequence[Any], Dict[str, Any]], Any]


class Interception(MetaPathFinder):
    """Calls a handler in the place of each function of the extension.

    Args:
        handler (callable): Gets the function, its arguments, and those by name.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._patches: List[Patch] = []
        self.originals: Dict[str, Callable] = {}

    def install(self) -> None:
        """Begin, now or as soon as the extension is imported; a second call changes nothing."""
        if self._patches or self in sys.meta_path:
            return
        module = sys.modules.get(EXTENSION)
        if module is not None:
            self.replace(module)
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Put everything back."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for patch in self._patches:
            patch.restore()
        self._patches = []
        self.originals = {}

    def replace(self, module: ModuleType) -> None:
        """Replace the functions of the extension.

        Args:
            module (ModuleType): The extension, imported.
        """
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, function in list(vars(module).items()):
            if callable(function) and not name.startswith('_'):
                self.originals[name] = function
                patch = patch_symbol(module, name, self._replacement(function), EXTENSION)
                self._patches.append(patch)

    def _replacement(self, function: Callable) -> Callable:
        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self._handler(function, args, kwargs)

        return replacement

    def find_spec(
        self, fullname: str, path: Any = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        """Find the extension as others do, to be told when it has been imported."""
        if fullname != EXTENSION:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _TellingLoader(spec.loader, self)
                return spec
        return None


class _TellingLoader(Loader):
    """Loads as another loader does, and then replaces the functions."""

    def __init__(self, loader: Any, interception: Interception) -> None:
        self._loader = loader
        self._interception = interception

    def create_module(self, spec: ModuleSpec) -> Optional[ModuleType]:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        # It may have been removed between finding and loading.
        if self._interception in sys.meta_path:
            self._interception.replace(module)
