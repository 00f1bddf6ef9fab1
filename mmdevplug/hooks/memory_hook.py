"""Log the memory of this rank, and warn if it keeps growing."""

import gc
from typing import Any, Dict, Optional, Union

import psutil
from mmengine import device as mmengine_device
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.distributed.process_group import rank_device, rank_devices
from mmdevplug.errors import DevPlugError
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
        interval (int, optional): Every so many iterations, collect garbage and return the
            device's cached memory. Both cost time, and PyTorch reuses cached memory anyway.
            Defaults to None: never.
        sample_interval (int): Iterations between two samples. Defaults to 50.
        warmup (int): Iterations in which memory may grow. Defaults to 200.
        growth_mb (float, optional): The least growth that is told of, in MB; None leaves growth
            alone. Defaults to 32.

    Examples:
        >>> cfg.accelerator = dict(type='cuda', memory=dict(interval=500))
    """

    priority = 'NORMAL'

    def __init__(
        self,
        interval: Optional[int] = None,
        sample_interval: int = 50,
        warmup: int = 200,
        growth_mb: Optional[float] = 32.0,
    ) -> None:
        _check('interval', interval, least=1, optional=True)
        _check('sample_interval', sample_interval, least=1)
        _check('warmup', warmup, least=0)
        _check('growth_mb', growth_mb, least=0, optional=True)
        self.interval = interval
        self.sample_interval = sample_interval
        self.warmup = warmup
        self.growth_mb = growth_mb
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
        f'{name} rose by {growth.bytes / MB:.1f} MB from iteration {growth.start} to {growth.end} '
        f'({growth.rate / 1024:.1f} kB an iteration)'
    )


def _shown_by_mmengine() -> bool:
    """Whether MMEngine's log processor has a column ``memory`` of its own."""
    # 0.10.0 does not know MUSA.
    is_musa_available = getattr(mmengine_device, 'is_musa_available', None)
    return mmengine_device.is_cuda_available() or bool(is_musa_available and is_musa_available())


def _check(name: str, value: Any, least: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    kinds = (int, float) if name == 'growth_mb' else (int,)
    if isinstance(value, kinds) and not isinstance(value, bool) and value >= least:
        return
    kind = 'number' if float in kinds else 'whole number'
    raise DevPlugError(
        f'MemoryHook.{name}={value!r} (accelerator.memory.{name}): expected a {kind} of at least '
        f'{least}{", or None" if optional else ""}.'
    )
