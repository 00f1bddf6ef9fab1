"""Launch variables, process groups and the transport of tensors between ranks."""

from mmdevplug.device import stack_samples, to_device

from .backend import available_backends, check_backend, resolve_backend
from .coalesced import broadcast_tensors
from .failure import before_abort, fail_together
from .heartbeat import enter_phase
from .launch import LaunchEnv, read_launch_env
from .process_group import DeviceContext, device_context, init_device, rank_device, rank_devices
from .samples import balance_samples, gather_samples
from .sampling import DynamicSampler, SamplingReport
from .staging import GradientStaging
from .waiting import run_on_main, wait_for_everyone

__all__ = [
    'DeviceContext',
    'DynamicSampler',
    'GradientStaging',
    'LaunchEnv',
    'SamplingReport',
    'available_backends',
    'balance_samples',
    'before_abort',
    'broadcast_tensors',
    'check_backend',
    'device_context',
    'enter_phase',
    'fail_together',
    'gather_samples',
    'init_device',
    'rank_device',
    'rank_devices',
    'read_launch_env',
    'resolve_backend',
    'run_on_main',
    'stack_samples',
    'to_device',
    'wait_for_everyone',
]
