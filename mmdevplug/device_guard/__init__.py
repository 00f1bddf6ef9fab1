"""Find, and repair, operations whose operands are on different devices."""

from .guard import POLICIES, DeviceGuard
from .mismatch import Mismatch, Operand, Source
from .stats import Moved, Site, SiteCount

__all__ = [
    'POLICIES',
    'DeviceGuard',
    'Mismatch',
    'Moved',
    'Operand',
    'Site',
    'SiteCount',
    'Source',
]
