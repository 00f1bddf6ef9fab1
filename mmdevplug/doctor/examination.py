"""Examine all sections in order; stop after the versions if torch or MMEngine are broken."""

from argparse import Namespace
from importlib import import_module
from typing import Any, Callable, Dict, Iterator

from . import versions
from .findings import Finding

#: How findings begin that keep the other sections from being examined.
_ESSENTIAL = tuple(
    start
    for name in versions.REQUIRED
    for start in (f'import {name} ', f'{name}: ', f'{name} is not installed')
)


def examine(args: Namespace, work_dir: str, say: Callable[[str], Any]) -> Iterator[Finding]:
    """Examine all that the arguments of ``mmdevplug doctor`` ask for.

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
    options = dict(config=args.config, accelerator=args.accelerator)
    ranks = args.nproc or 1
    sections: Dict[str, tuple] = dict(
        accelerators=(options,), launch=(), network=(), limits=(ranks, work_dir), patches=()
    )
    if args.config is not None:
        sections['config'] = (options, ranks)
    if args.nproc is not None:
        measure = (args.largest_mb, args.rounds, args.timeout)
        sections['collectives'] = (ranks, options, *measure)
    for name, arguments in sections.items():
        say(name)
        # Imported here, because they import torch.
        yield from import_module(f'mmdevplug.doctor.{name}').examine(*arguments)
