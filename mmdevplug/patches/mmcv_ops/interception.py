"""Intercept calls of the functions of ``mmcv._ext``.

All modules of ``mmcv.ops`` look a function up in the extension module at each call, so its
attributes are replaced. If mmcv is not imported yet, as before a runner has built its model, they
are replaced right after its import.
"""

import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence

from mmdevplug.utils.patching import OWN, Patch, patch_symbol

EXTENSION = 'mmcv._ext'
#: Gets the function, its arguments, and those by name.
Handler = Callable[[Callable, Sequence[Any], Dict[str, Any]], Any]


class Interception(MetaPathFinder):
    """Calls a handler in the place of each function of the extension."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._patches: List[Patch] = []
        self.originals: Dict[str, Callable] = {}

    def install(self) -> None:
        """Start, now or as soon as the extension is imported."""
        module = sys.modules.get(EXTENSION)
        if module is not None:
            self.replace(module)
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Restore the functions."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for patch in self._patches:
            patch.restore()
        self._patches = []
        self.originals = {}

    def replace(self, module: ModuleType) -> None:
        """Replace the functions of the extension."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, function in list(vars(module).items()):
            if callable(function) and not name.startswith('_'):
                self.originals[name] = function
                patch = patch_symbol(module, name, self._replacement(function), OWN)
                self._patches.append(patch)

    def _replacement(self, function: Callable) -> Callable:
        @wraps(function)
        def replacement(*args: object, **kwargs: object) -> Any:
            return self._handler(function, args, kwargs)

        return replacement

    def find_spec(
        self, fullname: str, path: Any = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        """Find the extension as other finders do, and replace its functions after it is loaded."""
        if fullname != EXTENSION:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._replace_after_loading(spec.loader)
                return spec
        return None

    def _replace_after_loading(self, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            # `remove` may have been called between finding and loading.
            if self in sys.meta_path:
                self.replace(module)

        loader.exec_module = exec_module
