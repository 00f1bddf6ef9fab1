"""The release of TopsRider."""

from .. import _GCUC

__all__ = ['get_version']


def get_version():
    return _GCUC.VERSION
