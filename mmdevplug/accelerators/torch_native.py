"""Eager devices that PyTorch knows by a module ``torch.<type>``: one class for all of them."""

from functools import cached_property, partial
from typing import Any, Callable, Dict, FrozenSet, NamedTuple, Optional

import torch

from mmdevplug.errors import AcceleratorError
from mmdevplug.registry import ACCELERATORS

from .base import Accelerator, Precision, privateuse1_name
from .vendor import import_vendor, register_vendor


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


class Function(NamedTuple):
    """A function of ``torch.<type>`` that some vendors leave out, or keep for PyTorch."""

    cost: str  # what is lost where nothing answers in its place
    generic: Optional[str] = None  # what answers of `torch.accelerator`, from PyTorch 2.6 on


FUNCTIONS: Dict[str, Function] = {
    'is_available': Function('a count above 0 is taken for it', 'is_available'),
    'device_count': Function('accelerator.device_count has to say it', 'device_count'),
    'set_device': Function('what names no device runs on device 0', 'set_device_index'),
    'current_device': Function('the device set last is taken for it', 'current_device_index'),
    'synchronize': Function('times in the log are of queueing', 'synchronize'),
    'manual_seed_all': Function('a seed does not reach the device'),
    'get_rng_state': Function('a resumed run draws other random numbers'),
    'set_rng_state': Function('a resumed run draws other random numbers'),
    'Event': Function('copies to the host wait'),
    'memory_allocated': Function('no memory of the device in the log'),
    'empty_cache': Function('cached memory is not returned'),
}
#: Functions of which those of ``torch.accelerator`` ask ``torch.<type>`` in turn.
_DELEGATED = ('is_available', 'device_count')
#: Functions that change nothing, which are called to see whether the vendor answers.
_READS = ('current_device', 'synchronize', 'get_rng_state', 'memory_allocated')


def _answer(answer: object) -> Any:
    return answer


class TorchNativePrecision(Precision):
    """The vendor's gradient scaler, if there is one."""

    def grad_scaler(self, **kwargs: object) -> Any:
        amp = getattr(getattr(torch, self.accelerator.device_type, None), 'amp', None)
        make = getattr(amp, 'GradScaler', super().grad_scaler)
        return make(**kwargs)


class TorchNativeAccelerator(Accelerator):
    """A device type with a module ``torch.<type>``, also of a vendor that is not listed here.

    Args:
        type (str): The device type, e.g. ``'npu'`` or the name given to PrivateUse1.
        package (str, optional): The vendor's package, imported before the device is looked for.
        native_backend (str, optional): The vendor's backend of torch.distributed.
        visible_devices_env (str, optional): The variable that limits the visible devices.
        register (str, optional): ``'package.module:function'``, called once after the import, of
            a package that does not register its device when it is imported.
        device_count (int, optional): The number of devices, where neither ``torch.<type>`` nor
            ``torch.accelerator`` tells it.

    Raises:
        AcceleratorError: If an argument has an invalid value.
    """

    precision = cached_property(TorchNativePrecision)
    register: Optional[str] = None
    _given_count: Optional[int] = None
    #: The index that was set last.
    _index = 0
    #: The functions of ``torch.<type>`` that the vendor keeps for PyTorch's callers.
    _guarded: FrozenSet[str] = frozenset()
    #: The functions that the vendor offers neither there nor through ``torch.accelerator``.
    _unanswered: FrozenSet[str] = frozenset()

    def __init__(
        self,
        type: str,
        package: Optional[str] = None,
        native_backend: Optional[str] = None,
        visible_devices_env: Optional[str] = None,
        register: Optional[str] = None,
        device_count: Optional[int] = None,
    ) -> None:
        if device_count is not None and (
            not isinstance(device_count, int) or isinstance(device_count, bool) or device_count < 1
        ):
            raise AcceleratorError(
                f'accelerator.device_count={device_count!r}: expected the number of devices that '
                f'a process sees, 1 or more.'
            )
        known = FAMILIES.get(type, Family())
        self.name = self.device_type = type
        self.package = package or known.package
        self.native_backend = native_backend or known.native_backend
        self.visible_devices_env = visible_devices_env or known.visible_devices_env
        self.register, self._given_count = register, device_count

    def _module(self) -> Any:
        """``torch.<type>``, after the vendor's package was imported; None if there is none."""
        if self.package is not None:
            import_vendor(self.package)
        if self.register is not None:
            register_vendor(self.register)
        return getattr(torch, self.device_type, None)

    def _is_registered(self) -> bool:
        return self._module() is not None or self.device_type == privateuse1_name()

    def is_available(self) -> bool:
        if not self._is_registered():
            return False
        answer = self._call('is_available', default=self._backend_answer())
        return self.device_count() > 0 if answer is None else answer

    def _backend_answer(self) -> Optional[bool]:
        """Whether ``torch.backends`` has a device, all that PyTorch 2.1 tells of mps."""
        ask = getattr(getattr(torch.backends, self.device_type, None), 'is_available', None)
        return None if ask is None else bool(ask())

    def device_count(self) -> int:
        """See :meth:`Accelerator.device_count`.

        Raises:
            AcceleratorError: If nothing tells it, or the config tells another number.
        """
        if not self._is_registered():
            return 0
        given = self._given_count
        count: Any = self._call('device_count', default=self._backend_answer())
        if count is None and given is None:
            raise AcceleratorError(
                f'nothing tells how many devices accelerator {self.name!r} has. '
                f'{self.missing_functions()} Expected the number in the config: '
                f'accelerator=dict(type={self.name!r}, device_count=1).'
            )
        if None not in (count, given) and count != given:
            raise AcceleratorError(
                f'accelerator.device_count={given}, but torch.{self.device_type} tells {count}. '
                f'Remove the key.'
            )
        count = given if count is None else int(count)
        self._answer_pytorch(count)
        return count

    def _answer_pytorch(self, count: int) -> None:
        """Add what PyTorch asks of the module: Adam of 2.13 fails without `is_available`."""
        module = self._module()
        for function, answer in (('is_available', count > 0), ('device_count', count)):
            if module is not None and not hasattr(module, function):
                setattr(module, function, partial(_answer, answer))

    def missing_functions(self) -> str:
        """See :meth:`Accelerator.missing_functions`."""
        module = self._module()
        if self.name == 'mps' or not self._is_registered():
            return ''
        for function in _READS:
            self._call(function)
        missing = [
            f'{function} ({described.cost})'
            for function, described in FUNCTIONS.items()
            if (not hasattr(module, function) or function in self._guarded)
            and self._generic(function) is None
            and not (function == 'device_count' and self._given_count)
        ]
        if not missing:
            return ''
        return f'torch.{self.device_type} does not offer: {", ".join(missing)}.'

    def _generic(self, function: str) -> Optional[Callable]:
        """What answers of ``torch.accelerator`` in place of a function; None if nothing does."""
        if function not in FUNCTIONS or function in self._unanswered:
            return None
        name = FUNCTIONS[function].generic
        generic = getattr(getattr(torch, 'accelerator', None), name or '', None)
        if generic is None:
            return None
        if function in _DELEGATED and not hasattr(self._module(), function):
            return None
        try:
            current = torch.accelerator.current_accelerator()
        except RuntimeError:  # the vendor registered no PrivateUse1HooksInterface
            return None
        return generic if current is not None and current.type == self.device_type else None

    def _call(self, function: str, *args: object, default: object = None) -> Any:
        """Call ``torch.<type>.<function>``, or what stands for it in ``torch.accelerator``.

        Devices are passed as their indices, which all vendors take; what is None is left out.

        Returns:
            Any: ``default`` if there is no such function.
        """
        # Functions of torch.mps take no device.
        skipped = torch.device if self.name == 'mps' else ()
        given = [arg for arg in args if not isinstance(arg, skipped)]
        given = [arg.index if isinstance(arg, torch.device) else arg for arg in given]
        given = [arg for arg in given if arg is not None]
        found = getattr(self._module(), function, None)
        if found is not None and function not in self._guarded:
            try:
                return found(*given)
            except Exception as error:
                # TorchTPU lets callers inside torch pass and tells all others to ask this.
                if 'torch.accelerator' not in str(error):
                    raise
                self._guarded |= {function}
        generic = self._generic(function)
        if generic is None:
            return default
        try:
            return generic(*given)
        except RuntimeError as error:
            # Of c10's guard, where a vendor overrides too little: "Backend doesn't support ..."
            if "doesn't support" not in str(error):
                raise
            self._unanswered |= {function}
            return default

    def device_name(self, device: torch.device) -> str:
        return self._call('get_device_name', device, default=self.device_type)

    def hardware_id(self, device: torch.device) -> Optional[str]:
        # PyTorch tells that of a GPU from 2.4 on.
        found = getattr(self._call('get_device_properties', device), 'uuid', None)
        return None if found is None else str(found)

    def set_device(self, device: torch.device) -> None:
        self._index = device.index or 0
        self._call('set_device', self._index)

    def synchronize(self, device: Optional[torch.device] = None) -> None:
        self._call('synchronize', device)

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

    def current_device(self) -> torch.device:
        return torch.device(self.device_type, self._call('current_device', default=self._index))


for _name in FAMILIES:
    ACCELERATORS.register_module(name=_name, module=partial(TorchNativeAccelerator, _name))
