"""Strategies of MMEngine's FlexibleRunner."""

from .device_strategy import DeviceStrategy

__all__ = ['DeviceStrategy']
