"""TPUs and whatever else torch_xla drives: lazy devices."""

import os
import sys
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

import torch
from torch import Tensor

from mmdevplug.errors import AcceleratorError
from mmdevplug.registry import ACCELERATORS

from .base import Copies, devices_of
from .lazy import LazyAccelerator, LazyCompilation
from .vendor import import_vendor


def _xm() -> Any:
    import torch_xla.core.xla_model as xm

    return xm


def _xlac() -> Any:
    import torch_xla

    return torch_xla._XLAC


def _runs_spmd() -> bool:
    import torch_xla.runtime as xr

    # Releases before 2.1 have no SPMD.
    return bool(getattr(xr, 'is_spmd', bool)())


def is_divided(tensor: Tensor) -> bool:
    """Whether the chips of one process have a part each of a tensor."""
    on_chips = tensor.device.type == 'xla'
    return on_chips and 'devices=' in _xlac()._get_xla_sharding_spec(tensor)


def _join(tensor: Tensor) -> Tensor:
    """Copy a tensor of which each chip has a part; torch_xla's own copy compiles a graph."""
    from torch_xla.distributed.spmd import XLAShardedTensor

    _xm().wait_device_ops()  # shards of a graph that still runs cannot be read
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device='cpu')
    for shard in XLAShardedTensor(tensor.detach()).local_shards:
        if shard.indices is Ellipsis:
            return shard.data
        # Padding is at the end; `shard.unpadded_data` indexes by a list, which PyTorch deprecates.
        part = shard.data[tuple(slice(0, each.stop - each.start) for each in shard.indices)]
        whole[tuple(shard.indices)] = part
    return whole


class XLACopies(Copies):
    """Copies of many tensors in one transfer."""

    def to_host(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        fetched: Dict[int, Tensor] = {}
        if _runs_spmd():
            # Only what has run is known to be divided.
            here = [tensor for tensor in tensors if tensor.device.type == 'xla']
            _xlac()._xla_sync_multi(here, devices=[], wait=True)
            fetched = {i: _join(x) for i, x in enumerate(tensors) if is_divided(x)}
        for device in devices_of(tensors):
            whole = [i for i, x in enumerate(tensors) if x.device == device and i not in fetched]
            copies = _xlac()._xla_get_cpu_tensors([tensors[i] for i in whole])
            fetched.update(zip(whole, copies))
        return [fetched[i].detach() for i in range(len(tensors))]

    def into_device(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for device in devices_of(targets):
            here = [(s, t) for s, t in zip(sources, targets) if t.device == device]
            sent = self.to_device([source.to(target.dtype) for source, target in here], device)
            for on_device, (_, target) in zip(sent, here):
                # Not `target.data = on_device`: with updates still to be run, torch_xla then
                # computes on stale values. A copy within a device costs no execution.
                target.copy_(on_device)

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> List[Tensor]:
        if not tensors:
            return []
        return _xm().send_cpu_data_to_device([t.detach().contiguous() for t in tensors], device)


class XLACompilation(LazyCompilation):
    """Graphs of torch_xla."""

    def materialize(
        self, device: Optional[torch.device] = None, wanted: Sequence[Tensor] = ()
    ) -> None:
        import torch_xla

        for tensor in wanted:
            # A view (accumulated gradients often are) is recorded only when it is read.
            if torch._is_functional_tensor(tensor):
                torch._sync(tensor)
        # torch_xla's `sync` runs the default device only.
        default = self.accelerator.current_device()
        self.accelerator.set_device(device or default)
        try:
            with self.compiling():
                torch_xla.sync()
        finally:
            self.accelerator.set_device(default)

    def count(self) -> int:
        from torch_xla.debug import metrics

        measured = metrics.metric_data('CompileTime')
        return measured[0] if measured else 0

    def optimization_barrier(self, tensors: Sequence[Tensor]) -> None:
        _xm().optimization_barrier_(list(tensors))


@ACCELERATORS.register_module(name='xla')
class XLAAccelerator(LazyAccelerator):
    """Devices of torch_xla, through PJRT.

    Args:
        spmd (bool): Whether this process drives all chips of the host as one device, among which
            the compiler divides each graph. Defaults to False: one chip for each process.
    """

    name = 'xla'
    package = 'torch_xla'
    copies = cached_property(XLACopies)
    compilation = cached_property(XLACompilation)
    _chosen_by_torch_xla = False

    def __init__(self, spmd: bool = False) -> None:
        if not isinstance(spmd, bool):
            raise AcceleratorError(f'accelerator.spmd={spmd!r}: expected True or False.')
        self.spmd = spmd

    @property
    def visible_devices_env(self) -> str:  # type: ignore[override]
        on_cpu = os.environ.get('PJRT_DEVICE', '').upper() == 'CPU'
        return 'CPU_NUM_DEVICES' if on_cpu else 'TPU_VISIBLE_CHIPS'

    def device_id(self, device: torch.device) -> Union[int, str]:
        # CPU_NUM_DEVICES is a count, not a list.
        on_cpu = self.visible_devices_env == 'CPU_NUM_DEVICES'
        return device.index or 0 if on_cpu else super().device_id(device)

    def requirement(self) -> str:
        return 'the package torch_xla, of the same release as torch'

    def is_available(self) -> bool:
        if 'torch_xla' not in sys.modules and 'PJRT_DEVICE' not in os.environ:
            # The import below writes torch_xla's own default there.
            XLAAccelerator._chosen_by_torch_xla = True
        return import_vendor('torch_xla') is not None

    def is_preferred(self) -> bool:
        # torch_xla falls back to the CPU, on which plain PyTorch is faster.
        from torch_xla._internal import tpu

        asked_for = 'PJRT_DEVICE' in os.environ and not XLAAccelerator._chosen_by_torch_xla
        return asked_for or tpu.num_available_chips() > 0

    def device_count(self) -> int:
        import torch_xla.runtime as xr

        if self.spmd and not xr.is_spmd():
            xr.use_spmd()
            _refuse_several_hosts(xr)
        if xr.is_spmd():
            return 1  # which stands for all
        local_world_size = int(os.environ.get('LOCAL_WORLD_SIZE', '1'))
        if xr.device_type() == 'TPU' and local_world_size > 1:
            # The processes of a host share its chips; before the runtime starts.
            from torch_xla._internal import pjrt

            pjrt.initialize_multiprocess(int(os.environ['LOCAL_RANK']), local_world_size)
        return xr.addressable_device_count()

    def device_name(self, device: torch.device) -> str:
        return _xm().xla_device_hw(device)

    def set_device(self, device: torch.device) -> None:
        _xlac()._xla_set_default_device(str(device))

    def current_device(self) -> torch.device:
        return torch.device(_xlac()._xla_get_default_device())

    def synchronize(self, device: Optional[torch.device] = None) -> None:
        self.compilation.materialize(device)
        _xm().wait_device_ops()

    def memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        return self._memory_info(device).get('bytes_used')

    def max_memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        return self._memory_info(device).get('peak_bytes_used')

    def memory_total(self, device: torch.device) -> Optional[int]:
        return self._memory_info(device).get('bytes_limit')

    def _memory_info(self, device: Optional[torch.device]) -> dict:
        try:
            return dict(_xm().get_memory_info(device or _xm().xla_device()))
        except RuntimeError as error:
            if 'UNIMPLEMENTED' not in str(error) and not self.spmd:
                raise
            return {}  # PJRT's CPU client keeps no statistics, nor does the device of all chips.

    def trace(self, folder: str) -> Optional[AbstractContextManager]:
        import torch_xla.debug.profiler as profiler

        # Releases before 2.8 record through a server, which a user has to start.
        return _trace(profiler, folder) if hasattr(profiler, 'start_trace') else None

    def manual_seed(self, seed: int) -> None:
        for index in range(self.device_count()):
            _xm().set_rng_state(seed, f'{self.device_type}:{index}')

    def save_rng(self, device: torch.device) -> bytes:
        return _xm().get_rng_state(str(device)).to_bytes(8, 'little')

    def load_rng(self, state: bytes, device: torch.device) -> None:
        _xm().set_rng_state(int.from_bytes(state, 'little'), str(device))


def _refuse_several_hosts(xr: Any) -> None:
    if xr.process_count() > 1:
        raise AcceleratorError(
            f'accelerator.spmd=True, but the chips belong to {xr.process_count()} processes: one '
            f'has to drive them all. Start one process, or leave spmd out.'
        )


@contextmanager
def _trace(profiler: ModuleType, folder: str) -> Iterator[None]:
    profiler.start_trace(folder)
    try:
        yield
    finally:
        profiler.stop_trace()
