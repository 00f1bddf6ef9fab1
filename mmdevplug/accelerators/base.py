"""The interface of an accelerator, one object for each family of devices, and of its parts."""

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import attrgetter
from typing import Any, Dict, Iterable, List, Optional, Sequence, Union

import torch
from torch import Tensor

from mmdevplug.errors import AcceleratorError, first_line
from mmdevplug.utils.torch_compat import default_autocast_dtype


def devices_of(tensors: Iterable[Tensor]) -> List[torch.device]:
    """The devices that tensors are on, each once, in the order in which they occur."""
    return list(dict.fromkeys(map(attrgetter('device'), tensors)))


def privateuse1_name() -> Optional[str]:
    """The name that a vendor gave to PyTorch's PrivateUse1 device, None if none did."""
    get_name = getattr(torch._C, '_get_privateuse1_backend_name', None)
    name = get_name() if get_name is not None else 'privateuseone'
    return None if name == 'privateuseone' else name


class Part:
    """One part of an accelerator, which it is built with."""

    def __init__(self, accelerator: 'Accelerator') -> None:
        self.accelerator = accelerator


class Copies(Part):
    """Copies between the host and the devices of an accelerator."""

    def to_host(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        """Copy tensors to the host in one call, detached."""
        return [tensor.detach().cpu() for tensor in tensors]

    def into_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy materialized tensors into host tensors, converting dtypes as ``copy_`` does."""
        # A lazy device is read in one call; an eager one needs no intermediate copy.
        fetched = self.to_host(sources) if self.accelerator.compilation.lazy else sources
        for source, target in zip(fetched, targets):
            target.copy_(source.detach())

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> List[Tensor]:
        """Copy host tensors to new tensors on a device, in one call."""
        return [tensor.detach().to(device) for tensor in tensors]

    def into_device(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy host tensors into existing device tensors of the same shapes, in one call."""
        for source, target in zip(sources, targets):
            target.copy_(source)


class Compilation(Part):
    """When operations run, and the graphs compiled for them: at once, and none, unless overridden.

    Attributes:
        lazy (bool): Whether operations run only when they are materialized.
        runs_again (bool): Whether an operation that a lazy device lacks runs what was recorded
            before it, which the iteration's graph then runs again.
    """

    lazy = False
    runs_again = False

    def materialize(
        self, device: Optional[torch.device] = None, wanted: Sequence[Tensor] = ()
    ) -> None:
        """Run the operations that a lazy device has recorded.

        Args:
            device (torch.device, optional): Defaults to None: the current one.
            wanted (Sequence[Tensor]): Tensors about to be copied to the host: computed in the same
                execution.
        """

    def materialize_all(
        self, devices: Sequence[torch.device], wanted: Sequence[Tensor] = ()
    ) -> None:
        """Materialize several devices; see :meth:`materialize`."""

    def recording(self, tensors: Iterable[Tensor]) -> List[torch.device]:
        """The devices of tensors that record operations; none where these run at once."""
        return []

    def count(self) -> Optional[int]:
        """The number of graphs that this process has compiled; None if it is unknown."""
        return None


class Precision(Part):
    """Mixed precision: PyTorch's autocast and gradient scaler unless overridden."""

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of mixed precision: PyTorch's.

        Raises:
            AcceleratorError: If PyTorch cannot cast on this device.
        """
        try:
            return default_autocast_dtype(self.accelerator.device_type)
        except RuntimeError as error:
            raise self._no_autocast(error) from error

    def autocast(
        self, dtype: Optional[torch.dtype] = None, enabled: bool = True, **kwargs: Any
    ) -> AbstractContextManager:
        """The mixed-precision context; ``dtype`` defaults to :attr:`dtype`.

        Raises:
            AcceleratorError: If it is to be enabled, and PyTorch cannot cast on this device.
        """
        kind = self.accelerator.device_type
        try:
            return torch.autocast(kind, dtype=dtype or self.dtype, enabled=enabled, **kwargs)
        except (AcceleratorError, AssertionError, RuntimeError) as error:
            if not enabled:
                return nullcontext()
            if isinstance(error, AcceleratorError):
                raise
            raise self._no_autocast(error) from error

    def _no_autocast(self, error: Exception) -> AcceleratorError:
        return AcceleratorError(
            f'torch {torch.__version__} has no mixed precision for accelerator '
            f'{self.accelerator.name!r}: {first_line(error)}. Expected a device that autocast '
            f"knows; train without, with optim_wrapper.type='OptimWrapper'."
        )

    @property
    def scaler_steps(self) -> bool:
        """Whether a scaler's own step may be called, which reads overflows from the device."""
        return not self.accelerator.compilation.lazy

    def grad_scaler(self, **kwargs: object) -> Any:
        """The gradient scaler for float16; arguments as of ``torch.cuda.amp.GradScaler``.

        Raises:
            AcceleratorError: If the family has none.
        """
        # PyTorch's for any device, from 2.3 on; on a lazy device it would read every overflow.
        scaler = getattr(getattr(torch, 'amp', None), 'GradScaler', None)
        if scaler is not None and not self.accelerator.compilation.lazy:
            return scaler(self.accelerator.device_type, **kwargs)
        raise AcceleratorError(
            f'accelerator {self.accelerator.name!r} has no gradient scaler; train in bfloat16, '
            f'which needs none, or without mixed precision.'
        )


class Accelerator(ABC):
    """One family of devices, eager unless a subclass says otherwise.

    A subclass names its device type and overrides what differs: methods, or a whole part, as in
    ``copies = cached_property(OwnCopies)``. Device indices are local to this process; memory is in
    bytes. Where a method takes an optional device, None is the current one.

    Attributes:
        name (str): The name in configs, e.g. ``'gcu'``.
        device_type (str): The type for ``torch.device``, e.g. ``'xla'`` for a T20 GCU.
        native_backend (str, optional): The vendor's backend of ``torch.distributed``.
        visible_devices_env (str, optional): The environment variable that limits the devices a
            process sees. It is read, never changed.
        package (str, optional): The vendor's package; None for devices of PyTorch itself.
        gloo_takes_tensors (bool): Whether gloo reads and writes tensors on these devices.
        shares_devices (bool): Whether all ranks of a host use one device (true for the CPU).
        draws_weights (bool): Whether a model's first weights are drawn on the device by default,
            and not on the host.
        only_by_name (bool): Whether automatic detection leaves it out.
        refused_backends (dict): Backends that do not work here, and why, as a sentence.
        copies (Copies): Copies between the host and the devices.
        compilation (Compilation): When operations run, and the graphs compiled for them.
        precision (Precision): Mixed precision.
    """

    name: str = ''
    device_type: str = ''
    native_backend: Optional[str] = None
    visible_devices_env: Optional[str] = None
    package: Optional[str] = None
    gloo_takes_tensors: bool = False
    shares_devices: bool = False
    draws_weights: bool = False
    only_by_name: bool = False
    refused_backends: Dict[str, str] = {}

    copies = cached_property(Copies)
    compilation = cached_property(Compilation)
    precision = cached_property(Precision)

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this process can use at least one device.

        Raises:
            AcceleratorError: If the vendor's package is installed but cannot be imported.
        """

    def is_preferred(self) -> bool:
        """Whether automatic detection may choose this family when it is available."""
        return True

    @abstractmethod
    def device_count(self) -> int:
        """The number of devices this process sees."""

    def requirement(self) -> str:
        """What :meth:`is_available` needs, for error messages."""
        if self.package is not None:
            return f'the package {self.package}'
        kind = self.device_type
        return f'a PyTorch build with {kind} support (torch.{kind}) and a visible device'

    def missing_functions(self) -> str:
        """One line on what the vendor does not offer, and what each lack costs; may be empty."""
        return ''

    def device_name(self, device: torch.device) -> str:
        """The product name of a device, or its type if the vendor reports none."""
        return self.device_type

    def device(self, local_rank: int = 0) -> torch.device:
        """The device of a local rank, with an index.

        A process that sees exactly one device uses index 0 whatever its local rank is, as under
        launchers that mask the devices.

        Raises:
            AcceleratorError: If there is no such device.
        """
        count, index = self.device_count(), local_rank * self.devices_per_rank()
        if count == 1 and local_rank >= 0:
            return torch.device(self.device_type, 0)
        if not 0 <= index < count:
            indices = f', indices 0 to {count - 1}' if count else ''
            raise AcceleratorError(
                f'LOCAL_RANK={local_rank} asks for {self.device_type}:{index}, but this '
                f'process sees {count} {self.name} device(s){indices} '
                f'({self.describe_visibility()}). Start at most {self.max_ranks()} processes on '
                f'this host, or make more devices visible.'
            )
        return torch.device(self.device_type, index)

    def devices_per_rank(self) -> int:
        """How many devices apart the devices of two ranks are that follow each other."""
        return 1

    def max_ranks(self) -> int:
        """How many ranks have a device of their own among those that this process sees."""
        return -(-self.device_count() // self.devices_per_rank())

    @abstractmethod
    def set_device(self, device: torch.device) -> None:
        """Make ``device`` the current one of this process."""

    def current_device(self) -> torch.device:
        """The current device of this process."""
        return self.device()

    @abstractmethod
    def synchronize(self, device: Optional[torch.device] = None) -> None:
        """Wait until the device has finished all work."""

    def describe_visibility(self) -> str:
        """The visible-devices variable and its value, for messages."""
        if self.visible_devices_env is None:
            return 'no variable limits the devices seen'
        value = os.environ.get(self.visible_devices_env)
        if value is None:
            return f'{self.visible_devices_env} is not set'
        return f'{self.visible_devices_env}={value!r}'

    def device_id(self, device: torch.device) -> Union[int, str]:
        """The device's entry in the visible-devices variable, or else its index."""
        names = os.environ.get(self.visible_devices_env or '', '').split(',')
        index = device.index or 0
        name = names[index].strip() if index < len(names) else ''
        return int(name) if name.isdecimal() else name or index

    def hardware_id(self, device: torch.device) -> Optional[str]:
        """What all processes of a host call a device, whichever they see; None if nothing does."""
        return None

    def memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        """Bytes in use on a device; None if the vendor does not report them."""
        return None

    def max_memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        """Peak of bytes in use; None if the vendor does not report it."""
        return None

    def memory_total(self, device: torch.device) -> Optional[int]:
        """Bytes that a device has; None if the vendor does not report them."""
        return None

    def empty_cache(self) -> None:
        """Return cached memory to the device."""

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices of this family that this process sees."""

    def renew_rng(self) -> None:
        """Seed anew where :meth:`save_rng` cannot tell how much was drawn since the last seed."""

    def save_rng(self, device: torch.device) -> Optional[bytes]:
        """The state of a device's generator, for this family only; None if it is unknown."""
        return None

    def load_rng(self, state: bytes, device: torch.device) -> None:
        """Put a device's generator into a state that :meth:`save_rng` returned."""

    def trace(self, folder: str) -> Optional[AbstractContextManager]:
        """Record to a folder with the vendor's own profiler; None if there is none."""
        return None

    def __repr__(self) -> str:
        return f'{type(self).__name__}(name={self.name!r}, device_type={self.device_type!r})'
