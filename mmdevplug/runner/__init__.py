"""The runner, loops and `init_device`: where the pieces meet."""

from mmdevplug.patches.mmengine import patch_device_id

from .device_runner import DeviceRunner
from .init_device import init_device

patch_device_id()  # the registry logs that it has found the runner, before there is one

__all__ = ['DeviceRunner', 'init_device']
