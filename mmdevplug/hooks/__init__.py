"""Hooks."""

from .communication_hook import CommunicationHook
from .device_hook import DeviceHook

__all__ = ['CommunicationHook', 'DeviceHook']
