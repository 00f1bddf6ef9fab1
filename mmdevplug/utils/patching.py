"""Replace symbols of other packages for a while, record what is replaced, and restore it.

Every replacement goes through :func:`patch_symbol`, and stands with its reason in
``docs/patch_table.py``. An attribute of one object is simply assigned, and so are
``sys.excepthook`` and ``warnings.showwarning``, which Python documents for that.
"""

import threading
from types import FunctionType, ModuleType
from typing import Any, List

#: When patches end: with the next job or ``restore_mmengine()``, with the latter alone, or where
#: the code that made one restores it, if ever.
JOB, KEPT, OWN = 'job', 'kept', 'own'
#: Stands for the value of a symbol that a class only inherits.
_INHERITED = object()


#: The patches of this process that are active, in the order in which they were applied.
_ACTIVE: List['Patch'] = []
_LOCK = threading.RLock()


class Patch:
    """A symbol that is replaced until :meth:`restore`; :func:`patch_symbol` creates it."""

    def __init__(self, owner: object, name: str, replacement: object, period: str) -> None:
        self.owner, self.name, self.period = owner, name, period
        self.original, self.replacement = _read(owner, name), replacement

    def __str__(self) -> str:
        return f'{full_name(self.owner)}.{self.name}'

    def restore(self) -> None:
        """Restore the original, unless another package has replaced the symbol since."""
        with _LOCK:
            if self not in _ACTIVE:
                return
            _ACTIVE.remove(self)
            for later in _ACTIVE:
                same = later.owner is self.owner and later.name == self.name
                if same and later.original is self.replacement:
                    later.original = self.original
            if _read(self.owner, self.name) is self.replacement:
                _write(self.owner, self.name, self.original)


def patch_symbol(owner: object, name: str, replacement: object, period: str = JOB) -> Patch:
    """Replace a symbol of another package.

    Args:
        owner (module, type or function): What holds the symbol.
        name (str): The name there, e.g. ``__code__`` of a function that others have imported.
        replacement: The new value. In a class, as the class holds it, e.g. a ``classmethod``.
        period (str): When :func:`restore_patches` restores it. Defaults to ``JOB``.

    Examples:
        >>> patch = patch_symbol(torch, 'load', load_safely, OWN)
        >>> patch.restore()
    """
    with _LOCK:
        patch = Patch(owner, name, replacement, period)
        _write(owner, name, replacement)
        _ACTIVE.append(patch)
    return patch


def active_patches(owner: object = None) -> List[Patch]:
    """The active patches, of one owner or of all, in the order in which they were applied."""
    with _LOCK:
        return [patch for patch in _ACTIVE if owner is None or patch.owner is owner]


def restore_patches(*periods: str) -> None:
    """Restore the patches of some periods, the latest first."""
    for patch in list(reversed(_ACTIVE)):
        if patch.period in periods:
            patch.restore()


def full_name(owner: Any) -> str:
    """The full name of a module, a class or a function."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f'{owner.__module__}.{owner.__qualname__}'


def _read(owner: object, name: str) -> Any:
    if isinstance(owner, FunctionType):
        return getattr(owner, name)
    # vars(), because getattr() would return a bound method for a classmethod.
    if isinstance(owner, type) and hasattr(owner, name):
        return vars(owner).get(name, _INHERITED)
    return vars(owner)[name]


def _write(owner: object, name: str, value: object) -> None:
    if value is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
