"""Replacing a function of another package for a while, and only for the caller who asks."""

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Callable, Iterator, Optional

Handler = Callable[..., Any]


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
        self._original: Any = None
        self._dispatch: Any = None

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
            self._users += 1
            if self._users > 1:
                return
            original = self._original = getattr(self._owner, self._name)

            @wraps(original, updated=())
            def dispatch(*args: Any, **kwargs: Any) -> Any:
                handler = self._handler.get()
                if handler is None:
                    return original(*args, **kwargs)
                return handler(original, *args, **kwargs)

            self._dispatch = dispatch
            setattr(self._owner, self._name, dispatch)

    def _remove(self) -> None:
        with self._lock:
            self._users -= 1
            # Somebody may have put a function of their own around it: theirs stays, and this one
            # calls the original from now on.
            if not self._users and getattr(self._owner, self._name) is self._dispatch:
                setattr(self._owner, self._name, self._original)
