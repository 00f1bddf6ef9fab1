"""Eager devices that PyTorch knows by a module ``torch.<type>``: one class for all of them."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from mmdevplug.errors import AcceleratorError
from mmdevplug.registry import ACCELERATORS

from .base import Accelerator, devices_of
from .vendor import import_vendor


class Family(NamedTuple):
    """What ``torch.<type>`` does not report itself."""

    package: Optional[str] = None
    native_backend: Optional[str] = None
    visible_devices_env: Optional[str] = None


FAMILIES: Dict[str, Family] = {
    'npu': Family('torch_npu', 'hccl', 'ASCEND_RT_VISIBLE_DEVICES'),
    'mlu': Family('torch_mlu', 'cncl', 'MLU_VISIBLE_DEVICES'),
    'musa': Family('torch_musa', 'mccl', 'MUSA_VISIBLE_DEVICES'),
    'sdaa': Family('torch_sdaa', 'tccl', 'SDAA_VISIBLE_DEVICES'),
    'neuron': Family('torch_neuronx', 'neuron', 'NEURON_RT_VISIBLE_CORES'),
    'xpu': Family(None, 'xccl', 'ZE_AFFINITY_MASK'),
    'hpu': Family('habana_frameworks.torch', 'hccl', 'HABANA_VISIBLE_MODULES'),
    'mps': Family(),
}


def privateuse1_name() -> Optional[str]:
    """The name that a vendor gave to PyTorch's PrivateUse1 device, None if none did."""
    get_name = getattr(torch._C, '_get_privateuse1_backend_name', None)
    name = get_name() if get_name is not None else 'privateuseone'
    return None if name == 'privateuseone' else name


class TorchNativeAccelerator(Accelerator):
    """A device type with a module ``torch.<type>``, also of a vendor that is not listed here.

    Args:
        type (str): The device type, e.g. ``'npu'`` or the name given to PrivateUse1.
        package (str, optional): The vendor's package, imported before the device is looked for.
        native_backend (str, optional): The vendor's backend of torch.distributed.
        visible_devices_env (str, optional): The variable that limits the visible devices.
    """

    def __init__(
        self,
        type: str,
        package: Optional[str] = None,
        native_backend: Optional[str] = None,
        visible_devices_env: Optional[str] = None,
    ) -> None:
        known = FAMILIES.get(type, Family())
        self.name = self.device_type = type
        self.package = package or known.package
        self.native_backend = native_backend or known.native_backend
        self.visible_devices_env = visible_devices_env or known.visible_devices_env

    def _module(self) -> Any:
        """``torch.<type>``, after the vendor's package was imported; None if there is none."""
        if self.package is not None:
            import_vendor(self.package)
        return getattr(torch, self.device_type, None)

    def is_available(self) -> bool:
        module = self._module()
        return module is not None and module.is_available()

    def device_count(self) -> int:
        module = self._module()
        return module.device_count() if module is not None else 0

    def _call(self, function: str, *args: Any, default: Any = None) -> Any:
        """Call ``torch.<type>.<function>``, if there is one, without arguments that are None."""
        found = getattr(self._module(), function, None)
        if found is None:
            return default
        # Functions of torch.mps take no device.
        skipped = torch.device if self.name == 'mps' else ()
        return found(*[arg for arg in args if arg is not None and not isinstance(arg, skipped)])

    def device_name(self, device: torch.device) -> str:
        return self._call('get_device_name', device, default=self.device_type)

    def set_device(self, device: torch.device) -> None:
        self._call('set_device', device)

    def synchronize(self, device: Optional[torch.device] = None) -> None:
        self._call('synchronize', device)

    def pins_memory(self) -> bool:
        try:
            torch.empty(1, pin_memory=True)
        except (RuntimeError, NotImplementedError):
            return False
        return hasattr(self._module(), 'Event')

    def start_copy_to_host(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> Optional[Callable[[], None]]:
        if not all(target.is_pinned() for target in targets) or not self.pins_memory():
            return super().start_copy_to_host(sources, targets)
        for source, target in zip(sources, targets):
            target.copy_(source.detach(), non_blocking=True)
        module, copied = self._module(), []
        for device in devices_of(sources):
            # torch.mps has one device and nothing to choose it with.
            with getattr(module, 'device', nullcontext)(device):
                copied.append(module.Event())
                copied[-1].record()

        def wait() -> None:
            for event in copied:
                event.synchronize()

        return wait

    def memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        return self._call('memory_allocated', device)

    def max_memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        return self._call('max_memory_allocated', device)

    def memory_total(self, device: torch.device) -> Optional[int]:
        if self.name == 'mps':
            return self._call('recommended_max_memory')
        free_and_total = self._call('mem_get_info', device)
        if free_and_total is not None:
            return free_and_total[1]
        return getattr(self._call('get_device_properties', device), 'total_memory', None)

    def empty_cache(self) -> None:
        self._call('empty_cache')

    def manual_seed(self, seed: int) -> None:
        self._call('manual_seed' if self.name == 'mps' else 'manual_seed_all', seed)

    def save_rng(self, device: torch.device) -> Optional[bytes]:
        state = self._call('get_rng_state', device)
        return None if state is None else bytes(state.cpu().tolist())

    def load_rng(self, state: bytes, device: torch.device) -> None:
        self._call('set_rng_state', torch.tensor(list(state), dtype=torch.uint8), device)

    def profiler_activity(self) -> Any:
        known = super().profiler_activity()
        if known is None and self.device_type == privateuse1_name():
            known = torch.profiler.ProfilerActivity.__members__.get('PrivateUse1')
        return known

    def current_device(self) -> torch.device:
        return torch.device(self.device_type, self._call('current_device', default=0))

    def autocast(
        self, dtype: Optional[torch.dtype] = None, enabled: bool = True, **kwargs: Any
    ) -> AbstractContextManager:
        """See :meth:`Accelerator.autocast`.

        Raises:
            AcceleratorError: If PyTorch cannot cast on this device.
        """
        try:
            return super().autocast(dtype, enabled, **kwargs)
        except (AssertionError, RuntimeError) as error:
            if not enabled:
                return nullcontext()
            raise AcceleratorError(
                f'torch {torch.__version__} has no mixed precision for accelerator '
                f'{self.name!r}: {error}. Expected a vendor package that offers it; train '
                f"without, with optim_wrapper.type='OptimWrapper'."
            ) from error

    def grad_scaler(self, **kwargs: Any) -> Any:
        vendor = getattr(getattr(self._module(), 'amp', None), 'GradScaler', None)
        if vendor is not None:
            return vendor(**kwargs)
        scaler = self._torch_grad_scaler(**kwargs)
        if scaler is not None:
            return scaler
        raise AcceleratorError(
            f'neither torch.{self.device_type}.amp nor torch.amp of torch {torch.__version__} has '
            f'a GradScaler; train {self.name!r} in bfloat16, which needs none.'
        )


for _name in FAMILIES:
    ACCELERATORS.register_module(name=_name, module=partial(TorchNativeAccelerator, _name))
