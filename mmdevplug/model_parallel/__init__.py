"""Spread one model over several devices: measure it, plan, and dispatch."""

from .device_plan import DevicePlan, PlannedBlock
from .dispatch import dispatch
from .make_plan import STRATEGIES, plan
from .parse_devices import parse_devices, parse_max_memory, probe_capacities
from .sizes import ModuleSizes, module_sizes

__all__ = [
    'STRATEGIES',
    'DevicePlan',
    'ModuleSizes',
    'PlannedBlock',
    'dispatch',
    'module_sizes',
    'parse_devices',
    'parse_max_memory',
    'plan',
    'probe_capacities',
]
