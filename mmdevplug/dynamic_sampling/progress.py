"""Show the progress of sampling: log lines, a progress bar and scalars."""

import logging
import sys
from typing import Any, NamedTuple, Optional, Tuple

from mmengine.logging import MessageHub, print_log

from mmdevplug.config.dynamic_sampling import DynamicSamplingOptions

from .decisions import DESCRIBED, Tally, round_name


class SamplingReport(NamedTuple):
    """How one pool was filled; numbers are samples of all ranks unless said otherwise."""

    pool: int  #: Its number, from 1.
    target: int  #: Samples that were requested.
    samples: int  #: What all ranks got together; below ``target`` after ``on_short='fewer'``.
    resamples: int  #: Rounds after the first.
    generated: int  #: What all ranks generated for it.
    valid: int  #: Those of them that were valid.
    reused: int  #: Valid ones that were left over from pools before.
    surplus: int  #: Valid ones that are left for the next pool.
    by_rank: Tuple[int, ...]  #: What each rank had to give, whether drawn for this pool or before.
    slice: Tuple[int, int]  #: Which part of the pool this rank got, as ``[begin:end]``.
    short: Optional[str] = None  #: ``'fewer'`` or ``'repeat'`` if there were too few.

    @property
    def kept(self) -> float:
        """The share of what was generated that was valid; 0 if nothing was."""
        return self.valid / self.generated if self.generated else 0.0


class ProgressLog:
    """Log on the first rank how a pool is filled, and keep scalars on all."""

    def __init__(self, options: DynamicSamplingOptions, rank: int, world_size: int) -> None:
        self._options, self._world_size = options, world_size
        self._is_first = rank == 0
        progress = options.sampler.progress
        self._has_bar = self._is_first and (sys.stderr.isatty() if progress is None else progress)
        self._bar: Any = None
        self._pool = 0

    def begin(self, pool: int) -> None:
        """Begin a pool."""
        self._pool = pool
        if self._has_bar:
            self._bar = _start_bar(self._options.target)

    def round(self, tally: Tally) -> None:
        """Show the counts after a round."""
        found, target = tally.valid * self._options.per_group, self._options.target
        name = round_name(tally.rounds - 1)
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.update(task, description=f'sampling, {name}', completed=min(found, target))
        if self._is_logged():
            self._log(f'{name}: {found}/{target}')

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def report(self, report: SamplingReport) -> None:
        """Log how a pool was filled and shared."""
        hub = MessageHub.get_current_instance()
        hub.update_scalars(
            {
                f'train/sampling/{name}': dict(value=getattr(report, name))
                for name in ('valid', 'generated', 'kept', 'resamples', 'surplus')
            },
            resumed=False,
        )
        if report.short is not None and self._is_first:
            self._log(
                f'{sum(report.by_rank)}/{report.target} samples, too few; '
                f'on_short={report.short!r} goes on with {report.samples}.',
                logging.WARNING,
            )
        if self._is_logged():
            ranks = range(self._world_size)
            each = report.samples // len(ranks)
            slices = ' '.join(f'[{rank * each}:{(rank + 1) * each}]' for rank in ranks[:DESCRIBED])
            others = len(ranks) - DESCRIBED
            self._log(
                f'ranks take {slices}{f" and {others} more" if others > 0 else ""} of '
                f'{report.samples} samples after {report.resamples} resample(s); '
                f'{report.surplus} valid sample(s) are left for the next pool.'
            )

    def dropped(self, samples: int, why: str) -> None:
        """Warn of samples that are given up, because nothing follows."""
        if self._is_first and samples:
            self._log(
                f'{why}; {samples} valid sample(s) of an unfinished pool of '
                f'{self._options.target} are dropped.',
                logging.WARNING,
            )

    def _is_logged(self) -> bool:
        interval = self._options.sampler.log_interval
        return self._is_first and bool(interval) and (self._pool - 1) % interval == 0

    def _log(self, text: str, level: int = logging.INFO) -> None:
        print_log(f'Sampling, pool {self._pool}: {text}', 'current', level)


def _start_bar(target: int) -> Any:
    """Show a bar below the log, which is gone when the pool is full."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn('{task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task('sampling, initial', total=target)
    bar.start()
    return bar
