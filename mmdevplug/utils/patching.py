"""Replace symbols of other packages for a while, record what is replaced, and restore it.

Every replacement goes through :func:`patch_symbol` and is listed in
:mod:`mmdevplug.utils.patched_symbols`.
"""

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any, Callable, Iterator, List, Optional

from .patched_symbols import PatchedSymbol, Period, find_symbol

Handler = Callable[..., Any]

#: Guards the record below.
_lock = threading.RLock()
#: All patches of this process that are active, in the order in which they were applied.
_active: List['Patch'] = []


class Patch:
    """A symbol that is replaced until :meth:`restore`; :func:`patch_symbol` creates it.

    Attributes:
        symbol (PatchedSymbol): Its entry in the list.
        owner (module, type or function): What holds the symbol.
        name (str): The name there.
        original: What stood there before, as the owner holds it.
        replacement: What stands there now.
    """

    def __init__(self, symbol: PatchedSymbol, owner: Any, name: str, replacement: Any) -> None:
        self.symbol, self.owner, self.name = symbol, owner, name
        self.original, self.replacement = _read(owner, name), replacement

    def restore(self) -> None:
        """Put the original back; a second call changes nothing.

        If somebody else has replaced the symbol since, theirs stays.
        """
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            for later in _active:
                same = later.owner is self.owner and later.name == self.name
                if same and later.original is self.replacement:
                    later.original = self.original
            if _read(self.owner, self.name) is self.replacement:
                _write(self.owner, self.name, self.original)


def patch_symbol(
    owner: Any, name: str, replacement: Any, listed_owner: Optional[str] = None
) -> Patch:
    """Replace a symbol of another package.

    Args:
        owner (module, type or function): What holds the symbol. Of a function, the variable of
            that name in its closure is replaced.
        name (str): The name there.
        replacement: The new value. In a class, as the class holds it, e.g. a ``classmethod``.
        listed_owner (str, optional): The owner's name in the list, where the symbol was imported
            into another module. Defaults to None: the full name of ``owner``.

    Returns:
        Patch: The handle that restores it.

    Raises:
        LookupError: If the symbol is not in
            :data:`mmdevplug.utils.patched_symbols.PATCHED_SYMBOLS`.

    Examples:
        >>> patch = patch_symbol(torch.serialization, 'pickle', restricted)
        >>> patch.restore()
    """
    symbol = find_symbol(listed_owner or full_name(owner), name)
    with _lock:
        patch = Patch(symbol, owner, name, replacement)
        _write(owner, name, replacement)
        _active.append(patch)
    return patch


def active_patches(*periods: Period) -> List[Patch]:
    """The patches that are active in this process, in the order in which they were applied.

    Args:
        *periods (Period): Only those of these periods. Defaults to all.
    """
    with _lock:
        return [patch for patch in _active if not periods or patch.symbol.period in periods]


def restore_patches(*periods: Period) -> None:
    """Restore the patches of some periods, the latest first.

    Args:
        *periods (Period): Which; none of them restores nothing.
    """
    for patch in reversed(active_patches(*periods) if periods else []):
        patch.restore()


def full_name(owner: Any) -> str:
    """The full name of a module, a class or a function."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f'{owner.__module__}.{owner.__qualname__}'


def _read(owner: Any, name: str) -> Any:
    if isinstance(owner, FunctionType):
        return _cell(owner, name).cell_contents
    # As the owner holds it: a class has the classmethod, not what it binds to.
    return vars(owner)[name]


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, FunctionType):
        _cell(owner, name).cell_contents = value
    else:
        setattr(owner, name, value)


def _cell(function: FunctionType, name: str) -> Any:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)]


class LocalPatch:
    """Call a handler in the place of a function, in the threads and contexts that ask for it.

    The function is looked up by name in its module by code that is not ours, so the name itself
    has to be replaced. What stands there in between asks who calls: outside of the context, and in
    other threads, the original gets all arguments as they are. The last context that ends puts the
    original back, also if contexts of several threads overlap or one ends with an error.

    Args:
        owner: The module or class that holds the function.
        name (str): Its name there.

    Examples:
        >>> patch = LocalPatch(torch, 'load')
        >>> with patch(lambda load, *args, **kwargs: load(*args, **{**kwargs, 'mmap': True})):
        ...     model.init_weights()
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._handler: ContextVar[Optional[Handler]] = ContextVar(name, default=None)
        self._lock, self._users = threading.Lock(), 0
        self._patch: Any = None

    @contextmanager
    def __call__(self, handler: Handler) -> Iterator[None]:
        """Let a handler take the calls from here, until the context ends.

        Args:
            handler (callable): Gets the original function, then the arguments of the call.
        """
        self._install()
        token = self._handler.set(handler)
        try:
            yield
        finally:
            self._handler.reset(token)
            self._remove()

    def _install(self) -> None:
        with self._lock:
            if self._users == 0:
                original = getattr(self._owner, self._name)

                @wraps(original, updated=())
                def dispatch(*args: Any, **kwargs: Any) -> Any:
                    handler = self._handler.get()
                    if handler is None:
                        return original(*args, **kwargs)
                    return handler(original, *args, **kwargs)

                self._patch = patch_symbol(self._owner, self._name, dispatch)
            self._users += 1

    def _remove(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._patch.restore()
