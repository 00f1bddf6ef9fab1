"""The interface of an accelerator: one object for each family of devices."""

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from mmdevplug.errors import AcceleratorError

#: Backends of torch.distributed for host tensors; what they do with others differs.
HOST_BACKENDS = ('gloo', 'mpi', 'ucc')


def devices_of(tensors: Iterable[Tensor]) -> List[torch.device]:
    """The devices that tensors are on, each once, in the order in which they occur."""
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def registered_device_types(backend: str) -> Sequence[str]:
    """The device types that a backend of torch.distributed was registered for.

    PyTorch 1 does not know them.
    """
    from torch import distributed as torch_dist

    return getattr(torch_dist.Backend, 'backend_capability', {}).get(backend, ())


def _registered_backend(device_type: str) -> Optional[str]:
    """The backend that a vendor's package registered for its device type alone, if any."""
    from torch import distributed as torch_dist

    backends = getattr(torch_dist.Backend, 'backend_capability', {})
    return next((name for name, types in backends.items() if list(types) == [device_type]), None)


class KeptGraphs(NamedTuple):
    """What became of graphs where compiled ones are kept on disk.

    Attributes:
        folder (str): Where they are kept.
        read (int): How many were found on disk, and were not compiled.
        missed (int): How many were not there, and were compiled.
        unreadable (int): How many were there and had to be compiled in spite of it.
    """

    folder: str
    read: int
    missed: int
    unreadable: int


class Accelerator(ABC):
    """One family of devices, eager unless a subclass says otherwise.

    A subclass names its device type and overrides what differs. Device indices are local to this
    process; memory is in bytes.

    Attributes:
        name (str): What a user asks for, e.g. ``'gcu'``.
        device_type (str): What ``torch.device`` takes, e.g. ``'xla'`` for a T20 GCU.
        lazy (bool): Whether operations run only when they are materialized.
        native_backend (str, optional): The vendor's backend of ``torch.distributed``.
        visible_devices_env (str, optional): The environment variable that limits the devices a
            process sees. It is read, never changed.
    """

    name: str = ''
    device_type: str = ''
    lazy: bool = False
    native_backend: Optional[str] = None
    visible_devices_env: Optional[str] = None
    #: The vendor's package, None for what PyTorch brings itself.
    package: Optional[str] = None
    #: Whether gloo reads and writes tensors of this family as they are.
    gloo_takes_tensors: bool = False
    #: Several ranks may share one device without being told (true of the CPU alone).
    shares_devices: bool = False

    # presence ---------------------------------------------------------------------------------

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
        """What has to be present for :meth:`is_available` to be true, for error messages."""
        return f'a PyTorch build with {self.device_type} support and a visible device'

    def device_name(self, device: torch.device) -> str:
        """The product name of a device, or its type where the vendor tells none."""
        return self.device_type

    # devices ----------------------------------------------------------------------------------

    def device(self, local_rank: int = 0) -> torch.device:
        """The device of a local rank.

        A process that sees exactly one device takes index 0 whatever its local rank, as under
        launchers that mask the devices.

        Args:
            local_rank (int): Index of this process among those of its host.

        Returns:
            torch.device: A device with an index.

        Raises:
            AcceleratorError: If there is no such device.
        """
        count = self.device_count()
        if count == 1 and local_rank >= 0:
            return torch.device(self.device_type, 0)
        if not 0 <= local_rank < count:
            indices = f', indices 0 to {count - 1}' if count else ''
            raise AcceleratorError(
                f'LOCAL_RANK={local_rank} asks for {self.device_type}:{local_rank}, but this '
                f'process sees {count} {self.name} device(s){indices} '
                f'({self.describe_visibility()}). Start at most {count} processes on this host, '
                f'or make more devices visible.'
            )
        return torch.device(self.device_type, local_rank)

    @abstractmethod
    def set_device(self, device: torch.device) -> None:
        """Make ``device`` the current one of this process."""

    def current_device(self) -> torch.device:
        """The device that this process computes on unless told otherwise."""
        return self.device()

    @abstractmethod
    def synchronize(self, device: Optional[torch.device] = None) -> None:
        """Wait until the device has done what was asked of it."""

    def materialize(
        self, device: Optional[torch.device] = None, wanted: Sequence[Tensor] = ()
    ) -> None:
        """Run what a lazy device has recorded; nothing to do on an eager one.

        Args:
            device (torch.device, optional): Defaults to None: the current one.
            wanted (Sequence[Tensor]): Tensors that are about to be fetched, which a device may
                have to be told of so that fetching them costs no execution of its own.
        """

    def materialize_all(
        self, devices: Sequence[torch.device], wanted: Sequence[Tensor] = ()
    ) -> None:
        """Materialize several devices, each with those of the tensors that are on it.

        Args:
            devices (Sequence[torch.device]): All that one model computes on.
            wanted (Sequence[Tensor]): See :meth:`materialize`.
        """
        for device in devices:
            here = [tensor for tensor in wanted if tensor.device == device]
            self.materialize(device, here if len(devices) > 1 else wanted)

    # compilation ------------------------------------------------------------------------------

    def compilations(self) -> Optional[int]:
        """How many graphs this process has compiled so far.

        Returns:
            int, optional: None where nothing is compiled, or the vendor tells no number.
        """
        return None

    def keep_compilations(self, folder: str) -> Optional[str]:
        """Keep compiled graphs in a folder, and take from there those that are in it.

        To be called before the device is first used, with a folder for this process alone.

        Args:
            folder (str): An existing folder.

        Returns:
            str, optional: Why this is of no use here, as the end of a sentence; None if it is.
        """
        return f'accelerator {self.name!r} compiles no graphs'

    def kept_compilations(self) -> Optional[KeptGraphs]:
        """What became of graphs since :meth:`keep_compilations`; None where nothing is kept."""
        return None

    def describe_visibility(self) -> str:
        """The visible-devices variable and its value, for messages."""
        if self.visible_devices_env is None:
            return 'no variable limits the devices seen'
        value = os.environ.get(self.visible_devices_env)
        if value is None:
            return f'{self.visible_devices_env} is not set'
        return f'{self.visible_devices_env}={value!r}'

    def device_id(self, device: torch.device) -> Union[int, str]:
        """What the host calls a device, of which this process may see a selection.

        Args:
            device (torch.device): A device of this family.

        Returns:
            int or str: Its entry in the visible-devices variable, or else its index.
        """
        names = os.environ.get(self.visible_devices_env or '', '').split(',')
        index = device.index or 0
        name = names[index].strip() if index < len(names) else ''
        return int(name) if name.isdecimal() else name or index

    # copies -----------------------------------------------------------------------------------

    def to_host(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        """Copy tensors of one device to the host in one call.

        Args:
            tensors (Sequence[Tensor]): Tensors of any shapes and dtypes.

        Returns:
            List[Tensor]: CPU tensors with the same shapes and dtypes.
        """
        return [tensor.detach().cpu() for tensor in tensors]

    def copy_to_host(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy device tensors into existing host tensors, converting dtypes as ``copy_`` does."""
        # A lazy device reads many tensors in one call; an eager one needs no copy in between.
        fetched = self.to_host(sources) if self.lazy else sources
        for source, target in zip(fetched, targets):
            target.copy_(source.detach())

    def start_copy_to_host(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> Optional[Callable[[], None]]:
        """As :meth:`copy_to_host`, but may return before the data are there.

        Returns:
            Callable or None: Waits for the data; None if they are there.
        """
        self.copy_to_host(sources, targets)
        return None

    def pins_memory(self) -> bool:
        """Whether copies are faster from and to page-locked host memory."""
        return False

    def copy_to_device(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy host tensors into existing device tensors of the same shapes, in one call."""
        for source, target in zip(sources, targets):
            target.copy_(source)

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> List[Tensor]:
        """Copy host tensors to a device in one call.

        Args:
            tensors (Sequence[Tensor]): Host tensors of any shapes and dtypes.
            device (torch.device): A device of this family.

        Returns:
            List[Tensor]: New tensors with the same shapes and dtypes.
        """
        return [tensor.detach().to(device) for tensor in tensors]

    # memory -----------------------------------------------------------------------------------

    def memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        """Bytes in use on a device, or None where the vendor tells nothing."""
        return None

    def max_memory_allocated(self, device: Optional[torch.device] = None) -> Optional[int]:
        """The largest number of bytes in use so far, or None where the vendor tells nothing."""
        return None

    def memory_total(self, device: torch.device) -> Optional[int]:
        """Bytes that a device has, or None where the vendor tells nothing."""
        return None

    def empty_cache(self) -> None:
        """Return cached memory to the device."""

    # random numbers and mixed precision -------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices of this family that this process sees."""

    def save_rng(self, device: torch.device) -> Optional[bytes]:
        """The state of a device's generator, None where the vendor does not tell it.

        It is to be used on a device of the same family alone.
        """
        return None

    def load_rng(self, state: bytes, device: torch.device) -> None:
        """Put a device's generator into a state that :meth:`save_rng` returned."""

    @property
    def amp_dtype(self) -> torch.dtype:
        """What mixed precision casts to unless told otherwise: PyTorch's own choice."""
        chosen = getattr(torch, 'get_autocast_dtype', None)
        # Older releases have float16 for whatever is not the CPU.
        return torch.float16 if chosen is None else chosen(self.device_type)

    def autocast(
        self, dtype: Optional[torch.dtype] = None, enabled: bool = True, **kwargs: Any
    ) -> AbstractContextManager:
        """The mixed-precision context of this family.

        Args:
            dtype (torch.dtype, optional): bfloat16 or float16. Defaults to :attr:`amp_dtype`.
            enabled (bool): Defaults to True.
        """
        dtype = dtype or self.amp_dtype
        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled, **kwargs)

    def grad_scaler(self, **kwargs: Any) -> Any:
        """The gradient scaler for float16, with the arguments of ``torch.cuda.amp.GradScaler``.

        Raises:
            AcceleratorError: If the family has none.
        """
        raise AcceleratorError(
            f'accelerator {self.name!r} has no gradient scaler; train in bfloat16, which needs '
            f'none, or without mixed precision.'
        )

    def _torch_grad_scaler(self, **kwargs: Any) -> Any:
        """PyTorch's scaler for any device, None in releases before it."""
        scaler = getattr(getattr(torch, 'amp', None), 'GradScaler', None)
        return None if scaler is None else scaler(self.device_type, **kwargs)

    # profiling --------------------------------------------------------------------------------

    def profiler_activity(self) -> Any:
        """What ``torch.profiler`` calls recording such a device, None if it knows none."""
        return torch.profiler.ProfilerActivity.__members__.get(self.device_type.upper())

    def trace(self, folder: str) -> Optional[AbstractContextManager]:
        """The vendor's own profiler, where ``torch.profiler`` records nothing of the device.

        Args:
            folder (str): Where it is to write.

        Returns:
            context manager: Records inside; None if no profiler is known.
        """
        return None

    # collectives ------------------------------------------------------------------------------

    def default_backend(self) -> str:
        """The backend of torch.distributed when a config names none."""
        from torch import distributed as torch_dist

        native = self.native_backend
        # What torch_xla registers runs inside of its graphs and takes nothing else.
        if native is None and not self.lazy:
            native = _registered_backend(self.device_type)
        if native is None or not hasattr(torch_dist.Backend, native.upper()):
            return 'gloo'
        is_available = getattr(torch_dist, f'is_{native}_available', lambda: True)
        return native if is_available() else 'gloo'

    def takes_tensors(self, backend: str) -> bool:
        """Whether a collective works on this family's tensors as they are.

        Args:
            backend (str): A name, or one for each device type: ``'cpu:gloo,cuda:nccl'``.
        """
        if ':' in backend:
            by_device = dict(part.split(':', 1) for part in backend.split(','))
            backend = by_device.get(self.device_type, '')
        if backend == 'gloo':
            return self.gloo_takes_tensors
        if backend == self.native_backend:
            return True
        if self.lazy or backend in HOST_BACKENDS:
            return False
        return self.device_type in registered_device_types(backend)

    def ddp_device_ids(self, device: torch.device) -> Optional[List[int]]:
        """What PyTorch's DDP wants as ``device_ids``: None where it takes no such list."""
        return None

    def __repr__(self) -> str:
        return f'{type(self).__name__}(name={self.name!r}, device_type={self.device_type!r})'
