"""Section *patches*: whether the symbols of other packages that are replaced are there."""

import sys
from importlib import import_module
from typing import Any, Iterator

from mmdevplug.utils.patched_symbols import PATCHED_SYMBOLS, PatchedSymbol

from .findings import Finding, Section

section = Section('patches')


def examine() -> Iterator[Finding]:
    """Look for the symbols of the packages that are imported; nothing is replaced to find out."""
    symbols = [one for one in PATCHED_SYMBOLS if one.owner.split('.')[0] in sys.modules]
    missing = [symbol for symbol in symbols if not _is_there(symbol)]
    count = f'{len(symbols) - len(missing)} of {len(symbols)}'
    yield section.ok(f'{count} symbols of other packages can be replaced')
    for symbol in missing:
        yield section.note(
            f'{symbol} is not there, so it is not replaced {symbol.period.begins}',
            f'{symbol.reason} Unnecessary when: {symbol.until}',
        )


def _is_there(symbol: PatchedSymbol) -> bool:
    names = symbol.owner.split('.')
    try:
        owner: Any = import_module(names[0])
        for number, name in enumerate(names[1:], 1):
            if not hasattr(owner, name):
                import_module('.'.join(names[: number + 1]))
            owner = getattr(owner, name)
    except (ImportError, AttributeError):
        return False
    if symbol.name == '*':
        return True
    code = getattr(owner, '__code__', None)  # of a function whose closure holds the symbol
    return hasattr(owner, symbol.name) or (code and symbol.name in code.co_freevars) is True
