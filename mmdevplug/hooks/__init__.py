"""Hooks."""

from .device_hook import DeviceHook

__all__ = ['DeviceHook']
