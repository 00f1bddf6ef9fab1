"""Show the progress of sampling: log lines, a progress bar and scalars."""

import logging
import sys
from typing import Any, Optional

from mmengine.logging import MessageHub, print_log

from .decisions import DESCRIBED, Tally, round_name
from .report import SamplingReport
from .settings import Settings


class ProgressLog:
    """Tells how a pool fills, on the first rank alone, and keeps scalars on all.

    Args:
        settings (Settings): Of the sampler.
        interval (int): Every how many pools are logged, 0 for none.
        bar (bool, optional): Whether there is a progress bar. Defaults to None: if the standard
            error is a terminal.
    """

    def __init__(self, settings: Settings, interval: int, bar: Optional[bool] = None) -> None:
        self._settings, self._interval = settings, interval
        self._speaks = settings.rank == 0
        self._bar_wanted = sys.stderr.isatty() if bar is None else bar
        self._bar: Any = None
        self._pool = 0

    def begin(self, pool: int) -> None:
        """A pool is about to be filled."""
        self._pool = pool
        if self._speaks and self._bar_wanted:
            self._bar = _Bar(self._settings.target)

    def round(self, tally: Tally) -> None:
        """All ranks have drawn."""
        found = tally.valid * self._settings.per_group
        name = round_name(tally.rounds - 1)
        if self._bar is not None:
            self._bar.show(name, found)
        if self._is_logged():
            print_log(f'{self._what()}: {name}: {found}/{self._settings.target}', 'current')

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def report(self, report: SamplingReport) -> None:
        """A pool is shared out."""
        scalars = dict(
            valid=report.valid,
            generated=report.generated,
            kept=report.kept,
            resamples=report.resamples,
            surplus=report.surplus,
        )
        hub = MessageHub.get_current_instance()
        hub.update_scalars(
            {f'train/sampling/{name}': dict(value=value) for name, value in scalars.items()},
            resumed=False,
        )
        if report.short is not None and self._speaks:
            print_log(
                f'{self._what()}: {sum(report.by_rank)}/{report.target} samples, too few; '
                f'on_short={report.short!r} goes on with {report.samples}.',
                'current',
                logging.WARNING,
            )
        if self._is_logged():
            world_size = self._settings.world_size
            each = report.samples // world_size
            slices = ' '.join(
                f'[{rank * each}:{(rank + 1) * each}]' for rank in range(world_size)[:DESCRIBED]
            )
            more = f' and {world_size - DESCRIBED} more' if world_size > DESCRIBED else ''
            print_log(
                f'{self._what()}: ranks take {slices}{more} of {report.samples} samples after '
                f'{report.resamples} resample(s); {report.surplus} valid sample(s) are left for '
                f'the next pool.',
                'current',
            )

    def dropped(self, samples: int, why: str) -> None:
        """Samples are given up, because nothing follows."""
        if self._speaks and samples:
            print_log(f'{self._what()}: {why}', 'current', logging.WARNING)

    def _is_logged(self) -> bool:
        return self._speaks and self._interval > 0 and (self._pool - 1) % self._interval == 0

    def _what(self) -> str:
        return f'Sampling, pool {self._pool}'


class _Bar:
    """A bar below the log, gone when the pool is full."""

    def __init__(self, target: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn('{task.description}'),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task('sampling, initial', total=target)
        self._progress.start()

    def show(self, name: str, found: int) -> None:
        total = self._progress.tasks[0].total or found
        self._progress.update(
            self._task, description=f'sampling, {name}', completed=min(found, total)
        )

    def stop(self) -> None:
        self._progress.stop()
