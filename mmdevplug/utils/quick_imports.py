"""Import PyTorch and MMEngine in less than half the time."""

import builtins
import gc
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Iterator, Mapping, Optional, Sequence

from .patching import patch_symbol

#: The module of MMEngine that imports transformers, for the sake of one optimizer.
_BUILDER = 'mmengine.optim.optimizer.builder'
_NAME = 'Adafactor'


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, and transformers only when its optimizer is used.

    A process that trains imports for 2.1 s instead of 4.8 s with PyTorch 2.13: transformers takes
    2.1 s, and collections, which look through everything imported so far again and again, 0.6 s.
    What was imported is frozen: no later collection looks through it, and processes that are
    forked share its memory.

    Examples:
        >>> with quick_imports():
        ...     import mmengine.runner
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with _import_transformers_later():
            yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()


class _Placeholder:
    """Is registered for ``transformers.Adafactor`` until somebody looks it up."""


class _Optimizers(dict):
    """The classes of MMEngine's registry; a look-up of Adafactor imports transformers.

    If that fails, the name is unknown, as in MMEngine without transformers.
    """

    def __contains__(self, key: object) -> bool:
        if key == _NAME:
            self._resolve()
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        if key == _NAME:
            self._resolve()
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> Any:
        if key == _NAME:
            self._resolve()
        return super().get(key, default)

    def pop(self, key: str, *default: object) -> Any:
        if key == _NAME:
            self._resolve()
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[Any]:
        # Overridden, so that dict(self) calls the methods of this class.
        return super().__iter__()

    def keys(self) -> Any:
        self._resolve()
        return super().keys()

    def values(self) -> Any:
        self._resolve()
        return super().values()

    def items(self) -> Any:
        self._resolve()
        return super().items()

    def _resolve(self) -> None:
        if super().get(_NAME) is not _Placeholder:
            return
        try:
            from transformers import Adafactor
        except ImportError:
            super().pop(_NAME)
            sys.modules[_BUILDER].TRANSFORMERS_OPTIMIZERS.remove(_NAME)
        else:
            self[_NAME] = Adafactor


@contextmanager
def _import_transformers_later() -> Iterator[None]:
    """Give MMEngine a placeholder for Adafactor if it is imported in this context."""
    if _BUILDER in sys.modules or 'transformers' in sys.modules:
        yield
        return
    original = builtins.__import__

    def import_(
        name: str,
        globals: Optional[Mapping[str, Any]] = None,
        locals: Optional[Mapping[str, object]] = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        asks = name == 'transformers' and (globals or {}).get('__name__') == _BUILDER
        if not asks or name in sys.modules or find_spec(name) is None:
            return original(name, globals, locals, fromlist, level)
        registry = globals['OPTIMIZERS']
        classes = _Optimizers(registry._module_dict)
        patch_symbol(registry, '_module_dict', classes, 'mmengine.registry.OPTIMIZERS')
        return SimpleNamespace(Adafactor=_Placeholder)

    patch = patch_symbol(builtins, '__import__', import_)
    try:
        yield
    finally:
        patch.restore()
