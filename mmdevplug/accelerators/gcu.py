"""Enflame GCU: two generations of cards, T20 and S60, behind one accelerator.

- T20, ``torch_gcu 1.10``: lazy devices that PyTorch calls ``xla:<index>``.
- S60, ``torch_gcu 2.5`` and later: eager devices of PyTorch's PrivateUse1, ``gcu:<index>``.

Neither card was available: both are tested with stand-ins that follow the vendor's published
interface.
"""

import os
import re
from functools import cached_property
from typing import Any, List, Optional, Sequence

import torch
from torch import Tensor

from mmdevplug.errors import AcceleratorError
from mmdevplug.registry import ACCELERATORS

from .base import Accelerator, Copies, Precision, devices_of
from .lazy import LazyAccelerator, LazyCompilation
from .torch_native import TorchNativeAccelerator
from .vendor import import_vendor


def _torch_gcu() -> Any:
    return import_vendor('torch_gcu')


class T20Copies(Copies):
    """Copies of tensors that are computed first."""

    def to_host(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        # Compute all tensors of a card in one graph before they are copied. torch_gcu refuses
        # tensors of the host.
        on_cards = [tensor for tensor in tensors if tensor.device.type == 'xla']
        for device in devices_of(on_cards):
            _torch_gcu().unlazy([tensor for tensor in on_cards if tensor.device == device])
        return super().to_host(tensors)

    def into_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        # For gradients, which are computed by then: nothing to unlazy.
        for source, target in zip(sources, targets):
            # Never seen: whether a copy to the host converts types as well.
            host = source.detach()
            target.copy_(host if host.dtype == target.dtype else host.cpu())

    def into_device(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for source, target in zip(sources, targets):
            target.copy_(source.detach().to(target.dtype).to(target.device))


class T20Compilation(LazyCompilation):
    """Graphs of torch_gcu."""

    def materialize(
        self, device: Optional[torch.device] = None, wanted: Sequence[Tensor] = ()
    ) -> None:
        # The default mode waits for the previous graph: two at a time may exceed a card's memory.
        with self.compiling():
            _torch_gcu().sync_lived_tensor(device=device)

    def count(self) -> Optional[int]:
        # The report is text for people; it has this metric under torch_xla's name.
        report = _torch_gcu().metrics_report()
        found = re.search(r'^Metric: CompileTime\s+TotalSamples: (\d+)', report, re.MULTILINE)
        return None if found is None else int(found.group(1))


class T20Precision(Precision):
    """Mixed precision of torch_gcu."""

    dtype = torch.float16

    def autocast(
        self, dtype: Optional[torch.dtype] = None, enabled: bool = True, **kwargs: object
    ):
        return _torch_gcu().amp.autocast(enabled=enabled, dtype=dtype or self.dtype, **kwargs)

    def grad_scaler(self, **kwargs: object) -> Any:
        """The vendor's scaler, of which `step` must not be called: it ends in a TypeError."""
        return _torch_gcu().amp.GradScaler(**kwargs)


class T20Accelerator(LazyAccelerator):
    """The lazy generation. One process sees all cards of its host."""

    name = 'gcu'
    package = 'torch_gcu'
    visible_devices_env = 'TOPS_VISIBLE_DEVICES'
    refused_backends = dict(
        eccl="On a T20, eccl is part of torch_gcu.distributed, the vendor's fork of "
        'torch.distributed, whose groups neither PyTorch nor MMEngine can use. '
    )
    copies = cached_property(T20Copies)
    compilation = cached_property(T20Compilation)
    precision = cached_property(T20Precision)
    _seed: Optional[int] = None

    def is_available(self) -> bool:
        return _torch_gcu() is not None and _torch_gcu().is_available()

    def device_count(self) -> int:
        return 0 if _torch_gcu() is None else _torch_gcu().device_count()

    def device_name(self, device: torch.device) -> str:
        return _torch_gcu().get_device_name(device.index)

    def device(self, local_rank: int = 0) -> torch.device:
        return _torch_gcu().gcu_device(super().device(local_rank).index)

    def devices_per_rank(self) -> int:
        """Clusters per card: rank r uses device r * LEO_CLUSTER_NUM."""
        value = os.environ.get('LEO_CLUSTER_NUM', '1')
        if not re.fullmatch('[1-9][0-9]*', value.strip()):
            raise AcceleratorError(
                f'LEO_CLUSTER_NUM={value!r}: expected the number of clusters of a card, 1 or '
                f'more. Local rank r uses xla:<r * LEO_CLUSTER_NUM>. Correct or unset it.'
            )
        return int(value)

    def describe_visibility(self) -> str:
        clusters = os.environ.get('LEO_CLUSTER_NUM')
        text = super().describe_visibility()
        return text if clusters is None else f'{text}, LEO_CLUSTER_NUM={clusters!r}'

    def set_device(self, device: torch.device) -> None:
        _torch_gcu().set_device(device.index)

    def current_device(self) -> torch.device:
        return torch.device(self.device_type, _torch_gcu().current_device())

    def synchronize(self, device: Optional[torch.device] = None) -> None:
        self.compilation.materialize(device)
        _torch_gcu().synchronize(device)

    def memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        return int(_torch_gcu().get_hbm_alloc_size(device))

    def manual_seed(self, seed: int) -> None:
        self._seed = seed % 2**32  # It refuses seeds of more bits.
        _torch_gcu().manual_seed_all(self._seed)

    def renew_rng(self) -> None:
        # torch_gcu reports no state, but the last seed is known.
        last = torch.initial_seed() if self._seed is None else self._seed
        self.manual_seed(last * 1664525 + 1013904223)

    def save_rng(self, device: torch.device) -> Optional[bytes]:
        return None if self._seed is None else self._seed.to_bytes(4, 'big')

    def load_rng(self, state: bytes, device: torch.device) -> None:
        self.manual_seed(int.from_bytes(state, 'big'))


class S60Accelerator(TorchNativeAccelerator):
    """The eager generation, an ordinary PrivateUse1 device."""

    def __init__(self) -> None:
        super().__init__(
            type='gcu',
            package='torch_gcu',
            native_backend='eccl',
            visible_devices_env='TOPS_VISIBLE_DEVICES',
        )


@ACCELERATORS.register_module(name='gcu')
def build_gcu(generation: Optional[str] = None) -> Accelerator:
    """Build the accelerator of the GCU generation that is installed.

    Args:
        generation (str, optional): ``'t20'`` or ``'s60'``. Defaults to None: as installed.

    Raises:
        AcceleratorError: If ``generation`` has another value or ``torch_gcu`` cannot be imported.
    """
    if generation not in (None, 't20', 's60'):
        raise AcceleratorError(
            f"accelerator.generation={generation!r}: expected 't20' (lazy, xla:<index>), 's60' "
            f'(eager, gcu:<index>), or nothing to take what is installed.'
        )
    if generation is None:
        torch_gcu = import_vendor('torch_gcu')
        # The package of the eager generation has no graphs to run.
        if torch_gcu is None:
            generation = 's60' if hasattr(torch, 'gcu') else 't20'
        else:
            generation = 't20' if hasattr(torch_gcu, 'sync_lived_tensor') else 's60'
    return S60Accelerator() if generation == 's60' else T20Accelerator()
