"""Show once what several processes of a host say alike."""

import hashlib
import warnings
from pathlib import Path
from typing import Any, Type, Union


def show_warnings_once(folder: Path) -> None:
    """Show a warning of Python on the first rank of this host that issues it, and on no other.

    In ``folder`` they leave files that say which ones were shown.
    """
    show, shown = warnings.showwarning, set()

    def show_first(
        message: Union[Warning, str],
        category: Type[Warning],
        filename: str,
        lineno: int,
        *more: Any,
        **options: Any,
    ) -> None:
        text = f'{category.__name__} {filename}:{lineno} {message}'
        if text not in shown:  # a filter may want it more than once
            if not says_first(text, folder):
                return
            shown.add(text)
        show(message, category, filename, lineno, *more, **options)

    warnings.showwarning = show_first


def says_first(text: str, folder: Path) -> bool:
    """Return whether no other process has said a text; ``folder`` is that of this host's job."""
    try:
        (folder / hashlib.sha1(text.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the command has ended: rather twice than never
        pass
    return True
