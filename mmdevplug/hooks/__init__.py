"""Hooks."""

from .communication_hook import CommunicationHook
from .device_hook import DeviceHook
from .loss_check_hook import LossCheckHook
from .memory_hook import MemoryHook
from .phase_hook import PhaseHook
from .preemption_hook import PreemptionHook
from .safe_checkpoint_hook import SafeCheckpointHook

__all__ = [
    'CommunicationHook',
    'DeviceHook',
    'LossCheckHook',
    'MemoryHook',
    'PhaseHook',
    'PreemptionHook',
    'SafeCheckpointHook',
]
