"""The runner, loops and `init_device`: where the pieces meet."""

from .device_runner import DeviceRunner
from .init_device import init_device

__all__ = [
    'DeviceRunner',
    'init_device',
]
