"""Streams, as numbers."""

from .device import _check_exists, _index_of


def get_exe_default_stream(device=None):
    _check_exists(_index_of(device, optional=True))
    return 0


def get_dma_default_stream(device=None):
    _check_exists(_index_of(device, optional=True))
    return 0
