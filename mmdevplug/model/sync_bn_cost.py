"""Measure once in a run what synchronized batch normalization costs on a lazy device."""

import time
from typing import Any, Optional, Tuple

from .sync_bn import LAZY_EXCHANGES, DeviceSyncBatchNorm

#: The iteration that is measured: graphs are compiled in the first ones.
MEASURED_ITERATION = 5


class SyncBNCost:
    """Measures one iteration of a run, and warns on rank 0."""

    def __init__(self) -> None:
        self._iterations = 0
        self._before: Optional[Tuple[float, int, float]] = None

    def after_iteration(self, runner: Any) -> None:
        """Count an iteration; warn after the one that is measured."""
        self._iterations += 1
        if self._iterations == MEASURED_ITERATION - 1:
            self._before = self._now()
        elif self._iterations == MEASURED_ITERATION and runner.rank == 0:
            self._warn(runner)

    @staticmethod
    def _now() -> Tuple[float, int, float]:
        return time.perf_counter(), LAZY_EXCHANGES.messages, LAZY_EXCHANGES.seconds

    def _warn(self, runner: Any) -> None:
        elapsed, executions, seconds = (
            now - before for now, before in zip(self._now(), self._before)
        )
        if not executions:
            return
        layers = sum(isinstance(part, DeviceSyncBatchNorm) for part in runner.model.modules())
        runner.logger.warning(
            f'{layers} synchronized batch normalization layer(s) add {executions} graph '
            f'executions to an iteration: iteration {MEASURED_ITERATION} spent '
            f'{1e3 * seconds:.1f} of {1e3 * elapsed:.1f} ms in them, computing included. Set '
            f"sync_bn='per_rank' to do without them; each rank then normalizes with the "
            f'statistics of its own batch.'
        )
