"""Accelerators with a collective backend of their own, which takes tensors of that device alone.

``native_card.install(NPU)`` makes the stand-in card ``npu`` with ``torch.npu`` as torch_npu has it
and the backend ``hccl``. The packages beside this file call it, as a vendor's package would when
it is imported: put ``standins/native/npu`` and the folders of this file and of ``card`` on the
path, then ``import torch_npu``. Tests do that with ``tests.native``.
"""

import os
import types
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Tuple

import card
import sync_bn_kernels
import torch
from torch import distributed as torch_dist

#: Why a release of PyTorch cannot have this card; None where it can.
MISSING = card.MISSING
#: The source of its process group.
GROUP = Path(__file__).with_name('native_group.cpp')


class Vendor(NamedTuple):
    """What differs between vendors, as their own sources say.

    Attributes:
        name (str): The device type.
        backend (str): The name of the backend of torch.distributed.
        visible (str): The variable that limits the devices a process sees.
        product (str): What ``get_device_name`` returns.
        label (str): What messages of the backend call a device.
        dtypes (tuple): What travels between ranks.
        sums (tuple): What can be reduced.
        average (bool): Whether the backend has ``ReduceOp.AVG``.
        uneven (bool): Whether all-gather takes outputs of different sizes.
        gather (bool): Whether the backend has a gather.
        extended (bool): Whether it is registered with ``extended_api``.
        sync_bn (bool): Whether PyTorch's own synchronized batch normalization works.
    """

    name: str
    backend: str
    visible: str
    product: str
    label: str
    dtypes: Tuple[torch.dtype, ...]
    sums: Tuple[torch.dtype, ...]
    average: bool = True
    uneven: bool = False
    gather: bool = True
    extended: bool = True
    sync_bn: bool = True


_COMMON = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.bool,
    torch.bfloat16,
)

#: ProcessGroupHCCL of torch_npu: no sum of doubles before the A5 cards, no gather.
NPU = Vendor(
    name='npu',
    backend='hccl',
    visible='ASCEND_RT_VISIBLE_DEVICES',
    product='Ascend910B1',
    label='NPU',
    dtypes=(*_COMMON, torch.int16, torch.float64),
    sums=(*_COMMON, torch.int16),
    uneven=True,
    gather=False,
)

#: ProcessGroupCNCL of torch_mlu: no averages, no 16-bit integers.
MLU = Vendor(
    name='mlu',
    backend='cncl',
    visible='MLU_VISIBLE_DEVICES',
    product='MLU590',
    label='MLU',
    dtypes=(*_COMMON, torch.float64),
    sums=(*_COMMON, torch.float64),
    average=False,
    extended=False,
)

#: A card and a backend that nobody has heard of.
ZETA = Vendor(
    name='zeta',
    backend='zccl',
    visible='ZETA_VISIBLE_DEVICES',
    product='Zeta 1',
    label='ZETA',
    dtypes=(*_COMMON, torch.float64),
    sums=(*_COMMON, torch.float64),
    sync_bn=False,
)

#: Cards whose makers publish no source of their backends: names as accelerate and public scripts
#: have them, what travels as for most.
SDAA = ZETA._replace(
    name='sdaa', backend='tccl', visible='SDAA_VISIBLE_DEVICES', product='SDAA', label='SDAA'
)
NEURON = ZETA._replace(
    name='neuron',
    backend='neuron',
    visible='NEURON_RT_VISIBLE_CORES',
    product='Trainium',
    label='NEURON',
)
TPU = ZETA._replace(
    name='tpu', backend='tpu_dist', visible='TPU_VISIBLE_CHIPS', product='TPU v6e', label='TPU'
)


#: Registrations last as long as this.
_KEPT: List[Any] = []


def _let_autograd_pass() -> None:
    """Let operators without a derivative reach the card, as vendors do where PyTorch does not."""
    key = 'AutogradPrivateUse1'
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key('c10d::allreduce_', key):
        _KEPT.append(torch._C._dispatch_library('IMPL', '_', key))
        _KEPT[0].fallback_fallthrough()


def install(vendor: Vendor) -> types.ModuleType:
    """Make the devices of a vendor, its module of torch and its backend.

    Args:
        vendor (Vendor): One of those above.

    Returns:
        module: ``torch.<name>``.
    """
    module = card.install(vendor.name, count=_visible_devices(vendor))
    _complete_module(module, vendor)
    extension = card.build_extension('native_group', GROUP)
    _let_autograd_pass()

    def make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        host = torch_dist.ProcessGroupGloo(store, rank, size, timeout)
        return extension.NativeGroup(
            host,
            rank,
            size,
            backend=vendor.backend,
            label=vendor.label,
            dtypes=list(vendor.dtypes),
            sums=list(vendor.sums),
            average=vendor.average,
            uneven=vendor.uneven,
            gather=vendor.gather,
        )

    def make_group_from(options: Any, _: Any = None) -> Any:
        return make_group(options.store, options.group_rank, options.group_size, options.timeout)

    torch_dist.Backend.register_backend(
        vendor.backend,
        make_group_from if vendor.extended else make_group,
        extended_api=vendor.extended,
        devices=[vendor.name],
    )
    if vendor.sync_bn:
        module.sync_bn_kernels = sync_bn_kernels.register()
    return module


def _visible_devices(vendor: Vendor) -> int:
    listed = os.environ.get(vendor.visible)
    count = int(os.environ.get('FAKECARD_COUNT', '4'))
    if listed is None:
        return count
    ranges = [part.partition('-') for part in listed.split(',') if part.strip()]
    return sum(
        index < count
        for first, _, last in ranges
        for index in range(int(first), int(last or first) + 1)
    )


class Event:
    """An event of a device whose operations are done when they return."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._recorded = False

    def record(self, stream: Any = None) -> None:
        self._recorded = True

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: 'Event') -> float:
        if not (self._recorded and end_event._recorded):
            raise RuntimeError('Both events must be recorded before calculating elapsed time.')
        return 0.0


class Stream:
    """A stream of a device whose operations are done when they return."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = device
        self.priority = priority
        # What PyTorch's streams have: FSDP2 reads it since PyTorch 2.15. 20 is PrivateUse1.
        self.stream_id, self.device_type = 0, 20
        self.device_index = device if isinstance(device, int) else getattr(device, 'index', 0) or 0

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: 'Stream') -> None:
        pass

    def record_event(self, event: Optional[Event] = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class StreamContext:
    """What ``torch.<name>.stream(stream)`` returns."""

    def __init__(self, stream_ctx: Optional[Stream]) -> None:
        self.stream = stream_ctx

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def _complete_module(module: types.ModuleType, vendor: Vendor) -> None:
    """Add what a vendor's ``torch.<name>`` has and the plain card has not."""
    name = vendor.name
    default = Stream()
    seeds = {'initial': torch.initial_seed()}

    def index(device: Any) -> int:
        if device is None:
            return module.current_device()
        if isinstance(device, int):
            number = device
        else:
            number = torch.device(device).index
            number = module.current_device() if number is None else number
        if not 0 <= number < module.device_count():
            raise RuntimeError(
                f'{name}: invalid device ordinal {number}, {module.device_count()} are visible'
            )
        return number

    class device:  # noqa: N801 as torch.cuda.device
        """Change the current device inside a with statement."""

        def __init__(self, device: Any) -> None:
            self.idx = -1 if device is None else index(device)

        def __enter__(self) -> None:
            self.before = module.current_device()
            if self.idx >= 0:
                set_device(self.idx)

        def __exit__(self, *error: Any) -> None:
            set_device(self.before)

    class device_of(device):  # noqa: N801
        """Change the current device to that of a tensor."""

        def __init__(self, obj: torch.Tensor) -> None:
            super().__init__(obj.device if obj.device.type == name else None)

    plain_set_device = module.set_device

    def set_device(device: Any) -> None:
        if not (isinstance(device, int) and device < 0):
            plain_set_device(index(device))

    def memory_stats(device: Any = None) -> dict:
        used = module.memory_allocated(index(device))
        peak = module.max_memory_allocated(index(device))
        return {'allocated_bytes.all.current': used, 'allocated_bytes.all.peak': peak}

    def mem_get_info(device: Any = None) -> Tuple[int, int]:
        total = limited[0] or 64 << 30
        return total - module.memory_allocated(index(device)), total

    limited = [0]
    plain_set_limit = module.set_limit

    def set_limit(size: int) -> None:
        limited[0] = size
        plain_set_limit(size)

    def manual_seed(seed: int) -> None:
        seeds['initial'] = int(seed)

    def seed() -> None:
        manual_seed(torch.seed())

    def get_device_properties(device_name: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name=vendor.product, total_memory=mem_get_info(device_name)[1], major=5, minor=0
        )

    def get_rng_state_all() -> List[torch.Tensor]:
        return [module.get_rng_state(each) for each in range(module.device_count())]

    def set_rng_state_all(new_states: List[torch.Tensor]) -> None:
        for each, state in enumerate(new_states):
            module.set_rng_state(state, each)

    def synchronize(device: Any = None) -> None:
        index(device)

    def get_device_name(device_name: Any = None) -> str:
        index(device_name)
        return vendor.product

    plain_get_rng_state, plain_set_rng_state = module.get_rng_state, module.set_rng_state

    def get_rng_state(device: Any = name) -> torch.Tensor:
        return plain_get_rng_state(index(device))

    def set_rng_state(new_state: torch.Tensor, device: Any = name) -> None:
        plain_set_rng_state(new_state, index(device))

    def nothing() -> None:
        pass

    module.init = module._lazy_init = nothing
    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.is_initialized = lambda: True
    module.device, module.device_of = device, device_of
    module.set_device = set_device
    module._get_device_index = lambda device, optional=False, allow_cpu=False: index(device)
    module.synchronize = synchronize
    module.get_device_name = get_device_name
    module.get_device_capability = lambda device=None: (5, 0) if name != 'npu' else None
    module.get_device_properties = get_device_properties
    module.can_device_access_peer = lambda device_id, peer_device_id: (
        index(device_id) != index(peer_device_id)
    )
    module.Stream, module.Event, module.StreamContext = Stream, Event, StreamContext
    module.stream = lambda stream: StreamContext(stream)
    module.set_stream = lambda stream: None
    module.current_stream = module.default_stream = lambda device=None: default
    module.memory_stats = memory_stats
    module.memory_stats_as_nested_dict = lambda device=None: dict(
        allocated_bytes=dict(all=dict(current=module.memory_allocated(index(device))))
    )
    module.memory_reserved = module.memory_allocated
    module.max_memory_reserved = module.max_memory_allocated
    module.memory_cached = module.memory_reserved
    module.max_memory_cached = module.max_memory_reserved
    module.memory_snapshot = lambda mempool_id=None: []
    module.memory_summary = lambda device=None, abbreviated=False: str(memory_stats(device))
    module.reset_peak_memory_stats = module.reset_max_memory_allocated = synchronize
    module.reset_max_memory_cached = module.reset_accumulated_memory_stats = synchronize
    module.set_per_process_memory_fraction = lambda fraction, device=None: None
    module.mem_get_info = mem_get_info
    module.set_limit = set_limit
    module.manual_seed = module.manual_seed_all = manual_seed
    module.seed = module.seed_all = seed
    module.initial_seed = lambda: seeds['initial']
    module.get_rng_state_all = get_rng_state_all
    module.set_rng_state_all = set_rng_state_all
    module.is_bf16_supported = lambda including_emulation=False: True
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    module.is_autocast_enabled = lambda: torch.is_autocast_enabled(name)
    module.set_autocast_enabled = lambda enable: torch.set_autocast_enabled(name, enable)
    module.get_autocast_dtype = lambda: torch.get_autocast_dtype(name)
    module.set_autocast_dtype = lambda dtype: torch.set_autocast_dtype(name, dtype)
    module.ipc_collect = nothing
    module.set_sync_debug_mode = lambda debug_mode: None
    module.get_sync_debug_mode = lambda: 0
    module.is_current_stream_capturing = lambda: False
    module.utilization = lambda device=None: 0
    module.amp = _amp(name)
    for dtype, kind in _TENSOR_TYPES.items():
        setattr(module, f'{kind}Tensor', _tensor_type(name, dtype, f'{kind}Tensor'))


#: As in ``torch.cuda.FloatTensor``.
_TENSOR_TYPES = {
    torch.bool: 'Bool',
    torch.uint8: 'Byte',
    torch.int8: 'Char',
    torch.int16: 'Short',
    torch.int32: 'Int',
    torch.int64: 'Long',
    torch.float16: 'Half',
    torch.bfloat16: 'BFloat16',
    torch.float32: 'Float',
    torch.float64: 'Double',
}


def _tensor_type(name: str, dtype: torch.dtype, kind: str) -> type:
    """Make a class that all tensors of a dtype on these devices are instances of."""

    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return (
                isinstance(value, torch.Tensor)
                and value.device.type == name
                and value.dtype == dtype
            )

        def __call__(cls, *args: Any) -> torch.Tensor:
            return torch.tensor(*args, dtype=dtype, device=name)

    return Kind(kind, (), dict(dtype=dtype, __module__=f'torch.{name}'))


def _amp(name: str) -> types.ModuleType:
    amp = types.ModuleType(f'torch.{name}.amp')

    class autocast(torch.autocast):  # noqa: N801 as torch.cuda.amp.autocast
        """Mixed precision on this device."""

        def __init__(
            self,
            enabled: bool = True,
            dtype: torch.dtype = torch.float16,
            cache_enabled: bool = True,
        ) -> None:
            super().__init__(name, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)

    class GradScaler(torch.amp.GradScaler):
        """The scaler for float16 on this device."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # torch_npu's own argument, for overflow without inf and nan.
            kwargs.pop('dynamic', None)
            super().__init__(name, *args, **kwargs)

    amp.autocast, amp.GradScaler = autocast, GradScaler
    amp.custom_fwd, amp.custom_bwd = torch.cuda.amp.custom_fwd, torch.cuda.amp.custom_bwd
    return amp
