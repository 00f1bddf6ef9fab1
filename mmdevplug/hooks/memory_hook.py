"""Log the memory of this rank, and warn if that of the host doubles."""

from contextlib import suppress
from multiprocessing import active_children
from time import perf_counter
from typing import Dict, Optional, Tuple

import psutil
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.accelerators import context_of
from mmdevplug.utils.annotations import AnyRunner

MB = 2**20
#: Iterations between two samples.
SAMPLE_INTERVAL = 50
#: Later samples are compared with this iteration: by then, all loader workers have started.
SETTLED = 10
#: Host memory that doubles by less than this is small anyway.
LEAST_GROWTH = 256 * MB
#: The largest part of the time spent on exact figures: Linux walks over all pages of a process
#: for one, up to 0.2 s for each GB.
TIME_FOR_READING = 0.001


@HOOKS.register_module()
class MemoryHook(Hook):
    """Log memory, and warn if that of the host doubles.

    The log line has ``host_memory``, the MB of host memory that this process and the workers of
    its data loaders use, where pages that they share count once; and for a model over several
    devices the most MB that were in use on each, if their vendor reports them. Both are from the
    last sample. The column ``memory`` is that of our log processor.

    One warning in a run says that ``host_memory`` has doubled since iteration 10, and grew by more
    than 256 MB. None of this runs anything on a lazy device.
    """

    priority = 'NORMAL'

    def before_train(self, runner: AnyRunner) -> None:
        """Begin anew: what was in use before is no growth."""
        self._process = psutil.Process()
        self._done = 0
        #: Bytes that each worker shares with the process that forked it, as last read.
        self._inherited: Dict[int, int] = {}
        self._began, self._spent = perf_counter(), 0.0
        #: Bytes of the host at iteration ``SETTLED``, until the warning.
        self._settled: Optional[int] = None

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Sample memory now and then."""
        self._done += 1
        if self._done not in (1, SETTLED) and self._done % SAMPLE_INTERVAL:
            return
        context = context_of(runner)
        of_workers, workers = self._measure_workers()
        used = self._process.memory_info().rss + of_workers
        shown = {'train/host_memory': used // MB}
        if context.more_devices:  # a model over several; the log has a column for one
            for device in context.devices:
                peak = context.accelerator.max_memory_allocated(device)
                if peak is not None:
                    shown[f'train/memory_{device}'] = peak // MB
        runner.message_hub.update_scalars(shown, resumed=False)
        if self._done == SETTLED:
            self._settled = used
        elif self._settled is not None and used > self._settled + max(self._settled, LEAST_GROWTH):
            with_workers = f' with its {workers} loader workers' if workers else ''
            runner.logger.warning(
                f'Host memory of rank {runner.rank}{with_workers} has doubled: '
                f'{self._settled // MB} MB in iteration {SETTLED} of this run, {used // MB} MB '
                f'now. If it does not grow with num_workers=0 (and persistent_workers=False), the '
                f'dataset or its transforms keep what they load. Otherwise memray or tracemalloc '
                f'names the lines that allocate it.'
            )
            self._settled = None

    def _measure_workers(self) -> Tuple[int, int]:
        """Return the bytes that loader workers hold alone, and how many workers there are."""
        children = active_children()
        if not children:
            return 0, 0
        running = [int(child.pid or 0) for child in children]
        self._inherited = {pid: kept for pid, kept in self._inherited.items() if pid in running}
        exact = [pid for pid in running if pid not in self._inherited]
        if self._inherited and self._spent <= TIME_FOR_READING * (perf_counter() - self._began):
            exact.append(next(iter(self._inherited)))  # which was read longest ago
        held = 0
        for pid in running:
            with suppress(psutil.Error):  # it has ended
                process = psutil.Process(pid)
                used = process.memory_info()
                anonymous = used.rss - getattr(used, 'shared', 0)
                if pid in exact:
                    began = perf_counter()
                    self._inherited.pop(pid, None)
                    self._inherited[pid] = anonymous - process.memory_full_info().uss
                    self._spent += perf_counter() - began
                held += anonymous - self._inherited[pid]
        return held, len(running)
