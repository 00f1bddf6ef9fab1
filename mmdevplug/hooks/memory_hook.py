"""Log the memory of this rank, and warn if it keeps growing."""

import gc
from typing import Any, Dict, Optional, Union

import psutil
from mmengine import device as mmengine_device
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.config.hook_options import MemoryOptions
from mmdevplug.distributed.process_group import rank_device, rank_devices
from mmdevplug.utils.byte_sizes import format_bytes
from mmdevplug.utils.memory_growth import MB, Growth, GrowthDetector, Snapshot


@HOOKS.register_module()
class MemoryHook(Hook):
    """Log memory, find leaks, and empty caches if asked to.

    The log line has ``host_memory``, the MB that this process holds in the host's memory, and
    ``memory``, the most MB that were in use on the device, where its vendor tells; MMEngine's own
    column of that name stays where there is one. Both are as of the last sample.

    When memory of the host or the device keeps growing, a warning says by how much, and which
    types of objects and which shapes of tensors there are more of than some iterations before.
    None of this runs anything on a lazy device.

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
        found = MemoryOptions(**options)
        self.interval = found.interval
        self.sample_interval = found.sample_interval
        self.warmup = found.warmup
        self.growth_mb = found.growth_mb
        self._process: Optional[psutil.Process] = None
        self._detectors: Dict[str, GrowthDetector] = {}
        self._done = 0
        self._suspected: Optional[str] = None
        self._before: Optional[Snapshot] = None

    def before_train(self, runner: Any) -> None:
        """Begin anew: what was in use before is no growth."""
        self._process = psutil.Process()
        self._detectors = {}
        self._done = 0
        self._suspected = self._before = None

    def after_train_iter(
        self,
        runner: Any,
        batch_idx: int,
        data_batch: Optional[Union[dict, tuple, list]] = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Empty caches, sample; see :meth:`mmengine.hooks.Hook.after_train_iter`."""
        self._done += 1
        if self.interval is not None and self._done % self.interval == 0:
            gc.collect()
            rank_device()[0].empty_cache()
        if self._done == 1 or self._done % self.sample_interval == 0:
            self._sample(runner)

    def _sample(self, runner: Any) -> None:
        accelerator, devices = rank_device()[0], rank_devices()
        resident = self._process.memory_info().rss  # type: ignore[union-attr]
        shown = {'train/host_memory': resident // MB}
        peaks = {device: accelerator.max_memory_allocated(device) for device in devices}
        known = {device: peak for device, peak in peaks.items() if peak is not None}
        if known and not _shown_by_mmengine():
            shown['train/memory'] = known.get(devices[0], 0) // MB
        if len(known) > 1:  # a model over several devices
            shown.update((f'train/memory_{d}', peak // MB) for d, peak in known.items())
        runner.message_hub.update_scalars(shown, resumed=False)
        if self.growth_mb is None:
            return
        if self._before is not None:
            self._report(runner)
        elif self._done > self.warmup:
            in_use: Dict[str, Optional[int]] = {'host memory': resident}
            in_use.update((f'{d}', accelerator.memory_allocated(d)) for d in devices)
            for name, value in in_use.items():
                if value is not None:
                    self._look_for_growth(runner, name, value)

    def _look_for_growth(self, runner: Any, name: str, value: int) -> None:
        if name not in self._detectors:
            self._detectors[name] = GrowthDetector(int((self.growth_mb or 0) * MB))
        growth = self._detectors[name].add(runner.iter + 1, value)
        if growth is not None:
            self._suspected = _describe(name, growth)
            self._before = self._snapshot()
            self._since = runner.iter + 1

    def _report(self, runner: Any) -> None:
        grown = self._snapshot().growth_since(self._before)
        what = (
            f'What there is more of than at iteration {self._since}: {"; ".join(grown)}'
            if grown
            else 'No Python object or tensor grew in number or size since: look at the libraries '
            'that allocate by themselves, and at the data they are given'
        )
        runner.logger.warning(
            f'Memory of rank {runner.rank} keeps growing: {self._suspected}. {what}.'
        )
        self._suspected = self._before = None

    @staticmethod
    def _snapshot() -> Snapshot:
        accelerator, _ = rank_device()
        return Snapshot(accelerator.device_type if accelerator.lazy else None)


def _describe(name: str, growth: Growth) -> str:
    return (
        f'{name} rose by {format_bytes(growth.bytes)} from iteration {growth.start} to '
        f'{growth.end} ({format_bytes(growth.rate)} an iteration)'
    )


def _shown_by_mmengine() -> bool:
    """Whether MMEngine's log processor has a column ``memory`` of its own."""
    # 0.10.0 does not know MUSA.
    is_musa_available = getattr(mmengine_device, 'is_musa_available', None)
    return mmengine_device.is_cuda_available() or bool(is_musa_available and is_musa_available())
