"""Launch variables, process groups and the transport of tensors between ranks."""

from .backend import available_backends, check_backend, resolve_backend
from .coalesced import broadcast_tensors
from .failure import fail_together
from .launch import LaunchEnv, read_launch_env
from .process_group import DeviceContext, device_context, init_device, rank_device
from .staging import GradientStaging

__all__ = [
    'DeviceContext',
    'GradientStaging',
    'LaunchEnv',
    'available_backends',
    'broadcast_tensors',
    'check_backend',
    'device_context',
    'fail_together',
    'init_device',
    'rank_device',
    'read_launch_env',
    'resolve_backend',
]
