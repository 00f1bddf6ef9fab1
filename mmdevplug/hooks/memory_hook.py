"""Log the memory of this rank, and warn if it keeps growing."""

import gc
from typing import Any, Dict, Optional

import psutil
from mmengine import device as mmengine_device
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.config.hook_options import MemoryOptions
from mmdevplug.distributed.rank_device import rank_device, rank_devices
from mmdevplug.utils.memory_growth import MB, GrowthDetector, ObjectCounts
from mmdevplug.utils.worker_memory import WorkerMemory

#: What the detector of their memory is called.
LOADER_WORKERS = 'loader workers'


@HOOKS.register_module()
class MemoryHook(Hook):
    """Log memory, find leaks, and empty caches on request.

    The log line has ``host_memory``, the MB of host memory that this process and the workers of
    its data loaders use, where pages that they share count once, and
    ``memory``, the most MB that were in use on the device, if its vendor reports them; MMEngine's
    own column of that name stays where there is one. Both are from the last sample.

    When memory of the host or the device keeps growing, a warning says by how much, and of which
    types of objects and which shapes of tensors there are more than some iterations before; the
    objects of loader workers cannot be seen. None of this runs anything on a lazy device.

    Args:
        **options: Fields of :class:`mmdevplug.config.hook_options.MemoryOptions`:
            ``interval=None`` (collecting garbage and returning cached memory cost time, and
            PyTorch reuses cached memory anyway), ``sample_interval=50``, ``warmup=200`` and
            ``growth_mb=32.0``.

    Examples:
        >>> cfg.accelerator = dict(type='cuda', memory=dict(interval=500))
    """

    priority = 'NORMAL'

    def __init__(self, **options: Any) -> None:
        self.options = MemoryOptions(**options)
        # A loop over iterations starts workers when it is built.
        self._workers = WorkerMemory()

    def before_train(self, runner: Any) -> None:
        """Begin anew: what was in use before is no growth."""
        self._process = psutil.Process()
        self._detectors: Dict[str, GrowthDetector] = {}
        self._done = 0
        #: The growth to explain at the next sample, and the objects when it was found.
        self._growth = ''
        self._before: Optional[ObjectCounts] = None

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Empty caches and sample memory, each at its interval."""
        self._done += 1
        if self.options.interval is not None and self._done % self.options.interval == 0:
            gc.collect()
            rank_device()[0].empty_cache()
        if self._done == 1 or self._done % self.options.sample_interval == 0:
            self._sample(runner)

    def _sample(self, runner: Any) -> None:
        accelerator, devices = rank_device()[0], rank_devices()
        resident = self._process.memory_info().rss
        of_workers, workers = self._workers.measure()
        shown = {'train/host_memory': (resident + of_workers) // MB}
        peaks = {device: accelerator.max_memory_allocated(device) for device in devices}
        known = {device: peak for device, peak in peaks.items() if peak is not None}
        if known and not _shown_by_mmengine():
            shown['train/memory'] = known.get(devices[0], 0) // MB
        if len(known) > 1:  # a model over several devices
            shown.update((f'train/memory_{d}', peak // MB) for d, peak in known.items())
        runner.message_hub.update_scalars(shown, resumed=False)
        if self.options.growth_mb is None:
            return
        if self._before is not None:
            self._report(runner, self._before)
        elif self._done > self.options.warmup:
            in_use = {str(device): accelerator.memory_allocated(device) for device in devices}
            of_host = {'host memory': resident, LOADER_WORKERS: of_workers}
            for name, value in {**of_host, **in_use}.items():
                if value is None:
                    continue
                detector = self._detectors.setdefault(
                    name, GrowthDetector(self.options.growth_mb * MB)
                )
                growth = detector.add(runner.iter + 1, value)
                if growth is not None and name == LOADER_WORKERS:
                    self._warn(
                        runner,
                        f'that of {workers} loader workers {growth}. Objects of other processes '
                        f'cannot be seen: look at what the dataset and its transforms keep, or '
                        f'set num_workers=0 (and persistent_workers=False) to have the '
                        f'objects named',
                    )
                elif growth is not None:
                    self._since, self._growth = runner.iter + 1, f'{name} {growth}'
                    self._before = _count_objects()

    def _report(self, runner: Any, before: ObjectCounts) -> None:
        grown = _count_objects().growth_since(before)
        what = (
            f'More than at iteration {self._since}: {"; ".join(grown)}'
            if grown
            else 'No Python object or tensor grew in number or size since: look at the libraries '
            'that allocate by themselves, and at the data they are given'
        )
        self._warn(runner, f'{self._growth}. {what}')
        self._before = None

    @staticmethod
    def _warn(runner: Any, what: str) -> None:
        runner.logger.warning(f'Memory of rank {runner.rank} keeps growing: {what}.')


def _count_objects() -> ObjectCounts:
    accelerator, _ = rank_device()
    return ObjectCounts(accelerator.device_type if accelerator.lazy else None)


def _shown_by_mmengine() -> bool:
    """Whether MMEngine's log processor has a column ``memory`` of its own."""
    # 0.10.0 does not know MUSA.
    is_musa_available = getattr(mmengine_device, 'is_musa_available', None)
    return mmengine_device.is_cuda_available() or bool(is_musa_available and is_musa_available())
