"""PyTorch's own lazy device, whose graphs run as TorchScript on the CPU.

It is part of PyTorch, and nobody trains on it to save time. It shows what a model or a loop does
on a lazy device, without a card. The entry point beside this module registers it, as that of a
maker's package does: see docs/en/add_an_accelerator.md.
"""

import warnings
from functools import cached_property
from typing import FrozenSet, List, Optional, Sequence

import torch
from torch import Tensor

from mmdevplug.accelerators.base import Copies, devices_of
from mmdevplug.accelerators.lazy import LazyAccelerator, LazyCompilation

#: What the device lacks of reading values, clipping and EMA, which find everything materialized.
AFTER_A_STEP = {
    'aten::_local_scalar_dense',
    'aten::copy',
    'aten::lerp.Scalar',
    'aten::linalg_vector_norm',
}


class TSLazyCopies(Copies):
    """Copies of tensors that are computed first."""

    def to_host(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        # Everything that was recorded: a part would run again with the rest.
        for device in devices_of([each for each in tensors if each.device.type == 'lazy']):
            self.accelerator.compilation.materialize(device)
        return super().to_host(tensors)


class TSLazyCompilation(LazyCompilation):
    """Graphs of TorchScript."""

    runs_again = True
    _lacking: FrozenSet[str] = frozenset()

    def materialize(
        self, device: Optional[torch.device] = None, wanted: Sequence[Tensor] = ()
    ) -> None:
        with self.compiling():
            torch._lazy.mark_step(str(device or self.accelerator.current_device()), wait=True)
        self._warn_of_missing()

    def _warn_of_missing(self) -> None:
        """Name the operations of a training that run what came before them once more."""
        from torch._lazy import metrics

        counted = {name for name in metrics.counter_names() if name.startswith('aten::')}
        new = counted.difference(self._lacking, AFTER_A_STEP)
        self._lacking |= new
        if new and torch.is_grad_enabled():
            warnings.warn(
                f"PyTorch's device 'lazy' has no {', '.join(sorted(new))}: each use runs the "
                f'recorded operations before it at once, and the iteration runs them again, so '
                f'dropout draws other elements in backward, and batch normalization updates its '
                f'running statistics twice. Expected: no such operation behind these layers. Set '
                f"the rate of dropout to 0, sync_bn='auto', or train on another device.",
                stacklevel=2,
            )

    def count(self) -> int:
        from torch._lazy import metrics

        found = 'UncachedCompile' in metrics.counter_names()
        return metrics.counter_value('UncachedCompile') if found else 0


class TSLazyAccelerator(LazyAccelerator):
    """The device ``lazy`` of ``torch._lazy``; each process has one."""

    name = device_type = 'lazy'
    shares_devices = True
    only_by_name = True
    copies = cached_property(TSLazyCopies)
    compilation = cached_property(TSLazyCompilation)
    _started = False

    def is_available(self) -> bool:
        # The backend cannot be started twice in a process.
        if not TSLazyAccelerator._started and hasattr(torch._C, '_lazy_ts_backend'):
            from torch._lazy import ts_backend

            ts_backend.init()
            TSLazyAccelerator._started = True
        return TSLazyAccelerator._started

    def requirement(self) -> str:
        return 'PyTorch 1.11 or later with torch._lazy'

    def device_count(self) -> int:
        return int(self.is_available())

    def set_device(self, device: torch.device) -> None:
        """Do nothing: there is one device."""

    def current_device(self) -> torch.device:
        return torch.device('lazy', 0)

    def synchronize(self, device: Optional[torch.device] = None) -> None:
        self.compilation.materialize(device)
        torch._lazy.wait_device_ops()
