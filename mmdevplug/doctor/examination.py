"""Examine all sections in order; stop after the versions if torch or MMEngine are broken."""

from importlib import import_module
from typing import Any, Callable, Dict, Iterator, Optional

from . import versions
from .findings import Finding

#: How findings begin that keep the other sections from being examined.
_ESSENTIAL = tuple(
    start
    for name in versions.REQUIRED
    for start in (f'import {name} ', f'{name}: ', f'{name} is not installed')
)


def examine(
    say: Callable[[str], Any],
    config: Optional[str] = None,
    accelerator: Optional[str] = None,
    ranks: Optional[int] = None,
    work_dir: str = 'work_dirs',
    largest_mb: float = 16.0,
    rounds: int = 5,
    timeout: float = 120.0,
) -> Iterator[Finding]:
    """Examine everything; the arguments are the options of ``mmdevplug doctor``.

    ``say`` is called with the name of each section before it is examined.
    """
    say('versions')
    broken = False
    for finding in versions.examine():
        broken |= finding.level == 'error' and finding.found.startswith(_ESSENTIAL)
        yield finding
    if broken:
        text = 'nothing else was examined, because that needs torch and MMEngine'
        yield Finding('versions', 'note', text)
        return
    options = dict(config=config, accelerator=accelerator)
    sections: Dict[str, tuple] = dict(
        accelerators=(options,), launch=(), network=(), limits=(ranks or 1, work_dir), patches=()
    )
    if config is not None:
        sections['config'] = (options, ranks or 1)
    if ranks is not None:
        sections['collectives'] = (ranks, options, largest_mb, rounds, timeout)
    for name, arguments in sections.items():
        say(name)
        # Imported here, because they import torch.
        yield from import_module(f'mmdevplug.doctor.{name}').examine(*arguments)
