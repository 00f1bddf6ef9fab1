"""Lazy devices, and the module ``torch.<type>`` that their packages do not provide.

PyTorch reads the random-number state from that module when it runs a checkpointed segment of a
model again, and fails if there is none.
"""

import warnings
from abc import abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from types import ModuleType
from typing import Iterable, Iterator, List, Sequence, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mmdevplug.utils.progress import show_progress

from .base import Accelerator, Compilation, devices_of

#: Executions of a process that may compile what all others use again: of weights, of steps.
FIRST_GRAPHS = 20

DeviceLike = Union[int, str, torch.device, None]


class LazyCompilation(Compilation):
    """Graphs of recorded operations, which :meth:`materialize` compiles and runs."""

    lazy = True
    _materialized = 0

    def compiling(self) -> AbstractContextManager:
        """Show progress while the first graphs of this process are compiled."""
        self._materialized += 1
        if self._materialized > FIRST_GRAPHS:
            return nullcontext()
        return show_progress('compiling the first graphs')

    def materialize_all(
        self, devices: Sequence[torch.device], wanted: Sequence[Tensor] = ()
    ) -> None:
        """See :meth:`Compilation.materialize_all`."""
        for device in devices:
            here = [tensor for tensor in wanted if tensor.device == device]
            self.materialize(device, here if len(devices) > 1 else wanted)

    def recording(self, tensors: Iterable[Tensor]) -> List[torch.device]:
        """See :meth:`Compilation.recording`."""
        kind = self.accelerator.device_type
        return [device for device in devices_of(tensors) if device.type == kind]

    def optimization_barrier(self, tensors: Sequence[Tensor]) -> None:
        """Keep the compiler from merging later operations on these tensors with earlier ones.

        It would compute a checkpointed segment only once and keep the result until backward, with
        all the memory that checkpointing should save.
        """


class LazyAccelerator(Accelerator):
    """A family whose operations run when they are materialized."""

    device_type = 'xla'
    compilation = cached_property(LazyCompilation)

    def device(self, local_rank: int = 0) -> torch.device:
        """See :meth:`Accelerator.device`; the first call registers ``torch.<type>``."""
        # Releases without this function keep the states of CUDA devices only and need no module.
        register = getattr(torch, '_register_device_module', None)
        if register is not None and not hasattr(torch, self.device_type):
            register(self.device_type, DeviceModule(self))
        return super().device(local_rank)

    @abstractmethod
    def current_device(self) -> torch.device:
        """The device of the last :meth:`set_device`."""


class DeviceModule(ModuleType):
    """The functions of ``torch.<type>`` that checkpointing, ``fork_rng`` and autocast call."""

    #: PyTorch keeps the random-number states of initialized modules.
    _initialized = True

    def __init__(self, accelerator: LazyAccelerator) -> None:
        super().__init__(f'torch.{accelerator.device_type}', 'Provided by mmdevplug.')
        self._accelerator = accelerator

    def _device(self, device: DeviceLike) -> torch.device:
        if device is None:
            return self._accelerator.current_device()
        if isinstance(device, int):
            return torch.device(self._accelerator.device_type, device)
        device = torch.device(device)
        return device if device.index is not None else self._accelerator.current_device()

    def is_available(self) -> bool:
        return self._accelerator.is_available()

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self._accelerator.device_count()

    def current_device(self) -> int:
        return self._accelerator.current_device().index

    def set_device(self, device: DeviceLike) -> None:
        self._accelerator.set_device(self._device(device))

    @contextmanager
    def device(self, device: DeviceLike) -> Iterator[None]:
        """Make a device the current one for a while."""
        before = self._accelerator.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self, device: DeviceLike = None) -> None:
        self._accelerator.synchronize(self._device(device))

    def manual_seed(self, seed: int) -> None:
        self._accelerator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: DeviceLike = None) -> Tensor:
        """The state as bytes, or none if the vendor does not report it."""
        self._accelerator.renew_rng()
        state = self._accelerator.save_rng(self._device(device))
        if state is None:
            warnings.warn(
                f'accelerator {self._accelerator.name!r} does not report the state of its '
                f'random numbers: dropout inside a checkpointed segment (with_cp, '
                f'activation_checkpointing) drops other elements when the segment is run again, '
                f'and its gradients are wrong. Expected: no dropout there. Set its rate to 0, or '
                f'checkpoint other segments.',
                stacklevel=2,
            )
        return torch.tensor(list(state or b''), dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: DeviceLike = None) -> None:
        """Restore what :meth:`get_rng_state` returned.

        PyTorch calls it without a device just before it runs a checkpointed segment again.
        """
        if device is None:
            self._separate_next_module()
        if state.numel():
            self._accelerator.load_rng(bytes(state.tolist()), self._device(device))

    def _separate_next_module(self) -> None:
        def optimization_barrier(_: nn.Module, inputs: Tuple[object, ...]) -> None:
            handle.remove()
            kind = self._accelerator.device_type
            tensors = [x for x in inputs if isinstance(x, Tensor) and x.device.type == kind]
            if tensors:
                self._accelerator.compilation.optimization_barrier(tensors)

        handle = register_module_forward_pre_hook(optimization_barrier)

    def get_amp_supported_dtype(self) -> List[torch.dtype]:
        return [torch.bfloat16, torch.float16]
