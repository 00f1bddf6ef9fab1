"""Section *patches*: which symbols of other packages are replaced, when and why."""

from typing import Iterator

from mmdevplug.utils.patched_symbols import group_symbols

from .findings import Finding, Section

section = Section('patches')


def examine() -> Iterator[Finding]:
    """List all patches; nothing is patched to find out."""
    for group in group_symbols():
        owner, _, period, reason, until = group[0]
        names = ', '.join(symbol.name for symbol in group)
        yield section.ok(
            f'{owner}: {names}; begin: {period.begins}; end: {period.ends}',
            why=f'{reason} Unnecessary when: {until}',
        )
