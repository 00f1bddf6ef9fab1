"""Hooks of MMEngine, one in each file."""

from .compilation_hook import CompilationHook
from .device_hook import DeviceHook
from .empty_cache_hook import DeviceEmptyCacheHook
from .iter_timer_hook import DeviceIterTimerHook
from .memory_hook import MemoryHook
from .phase_hook import PhaseHook
from .preemption_hook import PreemptionHook
from .profiler_hook import DeviceProfilerHook
from .safe_checkpoint_hook import SafeCheckpointHook

__all__ = [
    'CompilationHook',
    'DeviceEmptyCacheHook',
    'DeviceHook',
    'DeviceIterTimerHook',
    'DeviceProfilerHook',
    'MemoryHook',
    'PhaseHook',
    'PreemptionHook',
    'SafeCheckpointHook',
]
