"""All sections in order; what does not work keeps the next from being looked at, and is told."""

from importlib import import_module
from typing import Any, Callable, Iterator, List, NamedTuple, Optional

from . import versions
from .findings import Finding


class Wanted(NamedTuple):
    """What to look at.

    Attributes:
        config (str, optional): Path of a config.
        accelerator (str, optional): Name of the one to look at; all that are there when None.
        ranks (int, optional): How many processes to start; none when None.
        timeout (float): Of a collective, in seconds.
        largest_mb (float): Of a message.
        rounds (int): How often a collective is timed.
        work_dir (str): Where checkpoints would go.
    """

    config: Optional[str] = None
    accelerator: Optional[str] = None
    ranks: Optional[int] = None
    timeout: float = 120.0
    largest_mb: float = 16.0
    rounds: int = 5
    work_dir: str = 'work_dirs'


def examine(wanted: Wanted, say: Callable[[str], Any] = lambda section: None) -> List[Finding]:
    """Look at everything.

    Args:
        wanted (Wanted): What to look at.
        say (Callable): Called with the name of each section before it is looked at.
    """
    say('versions')
    findings = versions.examine()
    broken = [f for f in findings if f.level == 'error' and f.found.startswith(_ESSENTIAL)]
    if broken:
        findings.append(
            Finding(
                'versions',
                'note',
                'nothing else was looked at, because that needs torch and MMEngine',
            )
        )
        return findings
    return findings + list(_others(wanted, say))


_ESSENTIAL = tuple(
    start
    for name in versions.REQUIRED
    for start in (f'import {name} ', f'{name}: ', f'{name} is not installed')
)


def _others(wanted: Wanted, say: Callable[[str], Any]) -> Iterator[Finding]:
    options = dict(config=wanted.config, accelerator=wanted.accelerator)
    ranks = wanted.ranks or 1
    # They import torch, which is known to work by now.
    for name, arguments in (
        ('accelerators', (options,)),
        ('launch', ()),
        ('network', ()),
        ('limits', (ranks, wanted.work_dir)),
        ('patches', ()),
    ):
        say(name)
        yield from import_module(f'mmdevplug.doctor.{name}').examine(*arguments)
    if wanted.config is not None:
        say('config')
        yield from import_module('mmdevplug.doctor.config').examine(options, ranks)
    if wanted.ranks is not None:
        say('collectives')
        comm_job = import_module('mmdevplug.doctor.comm_job')
        job = comm_job.run_job(
            wanted.ranks, options, wanted.largest_mb, wanted.rounds, wanted.timeout
        )
        yield from comm_job.examine(job, wanted.ranks, wanted.timeout)
