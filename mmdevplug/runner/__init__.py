"""Runners."""

from .device_runner import DeviceRunner

__all__ = ['DeviceRunner']
