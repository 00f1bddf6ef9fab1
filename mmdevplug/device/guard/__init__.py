"""Finding, and repairing, operations whose operands are on different devices."""

from .guard import POLICIES, DeviceGuard
from .ledger import Moved, Site, SiteCount
from .mismatch import Mismatch, Operand, Source

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
